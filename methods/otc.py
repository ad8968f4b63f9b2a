"""OTC: reward a right answer more, the fewer tools it took.

Paper: "OTC: Optimal Tool Calls via Reinforcement Learning" (v1: "Acting Less is Reasoning More!"), arXiv 2504.14870 (v2). No official
code; search follows Search-R1's (commit a14dc3a), programs follow ToRL's (commit cb78cf1c).

The idea. A model that is paid for right answers only calls tools it does not need. Here the reward of an answer is multiplied by a
number between 0 and 1 that says how thrifty the way to it was, so a wrong answer stays worth nothing and a right one is worth most with the
fewest calls that any right answer to that question has needed. The paper finds that calls fall by half or more, and that the answers stay.

The method, step by step:
  1. Prompt and environment are those of Search-R1 (`--task search`, with a prompt that asks for thrift) or of ToRL (`--task code`).
  2. `grade` says whether the answer is right: 1 or 0.
  3. `FewestCalls` keeps, for every question, the fewest calls of a right answer over all epochs: n (GRPO only).
  4. `tool_reward` turns m calls into a number: cos(m pi / (2 m + c)) for PPO; sin(m pi / (m + n)) for GRPO where n > 0.
  5. `reward` multiplies: alpha * tool reward * right.
  6. `train`: advantages from the group (OTC-GRPO) or from a critic (OTC-PPO), clipped policy gradient over the sampled tokens.

Kept from the paper: formulas 4 to 7, c = the limit of calls, n as the minimum over epochs, alpha = 1, both algorithms, both kinds of tool.
Changed, and why:
  - for programs the right answer counts 1 and a wrong one 0: with ToRL's +1/-1 the product would reward more calls in wrong answers. The
    paper does not say which it used.
  - n is lowered before a group is scored, so a new best answer is worth 1 at once (the paper does not say).
  - what is true of our Search-R1 and ToRL is true here: token in, token out; only the model's own words are scored; tags in results are
    harmless; a turn that asks for output without a program is answered with a note.

What to watch: `calls` falls while `em` or `accuracy` stays; `productivity`, right answers per call, rises.

    make otc                                                  # search, tiny model and world, a few minutes on two cores
    make otc ARGS="--over-caller 160"                         # from a start that is able and calls too much
    make otc ARGS="--over-caller 160 --tool-reward off"       # the same without OTC: the paper's baseline
    make otc ARGS="--task code --max-turns 3"
    make otc ARGS="--tool-reward add"                         # the paper's additive variant
    make otc ARGS="--algorithm ppo"
"""
import math
import random
import re
from dataclasses import dataclass
from typing import Literal

import torch

from common import UserError, losses, ranks, scoring
from common.data import Example, order, training_and_held_out
from common.engine import make_engine
from common.maths import last_boxed, maths_equal, maths_self_test
from common.plan import print_plan
from common.policy import Critic, load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, Call, End, Notice, ToolFailure, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.run import Clock, Run, main, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting
from common.sandbox import Limits, Outcome, open_sandbox
from common.search import Passage, neutralise
from common.tiny.world import problem, problems, questions, world
from common.tools import python_tool, search_tool
from common.update import Experience, critic_step, demonstration_row, joined, mini_batches, policy_step, score, supervised_step, values


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny or paper", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of data order and sampling", "ours")
    task: Literal["search", "code"] = setting("search", "which tool: a search engine (on Search-R1) or Python (on ToRL)", "paper §4.1")
    steps: int = setting(40, "optimisation steps (one rollout batch each)", "code scripts/nq_hotpotqa/v0.2/")
    resume: bool = setting(False, "go on with a run that was stopped or killed", "ours")
    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")
    evaluate: str = setting("", "folder of a finished run: evaluate its model again instead of training", "ours")
    plan: bool = setting(False, "instead of training, print what these settings need: memory per GPU, tokens, disk; nothing is loaded", "ours")
    # model and data
    model: str = setting("tiny", "tiny, smollm2, a folder, or a hub id", "paper §4.1")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "type of the weights", "ours")
    device: str = setting("cpu", "cpu or cuda", "ours")
    threads: int = setting(0, "CPU threads; 0: one per core", "ours")
    engine: Literal["hf", "vllm"] = setting("hf", "engine that samples: hf, or vllm (make setup_vllm)", "ours")
    data: str = setting("tiny", "training questions: tiny, a .jsonl, .json or .parquet file, or a hub data set id", "paper §4.1")
    train_questions: int = setting(256, "questions of the tiny world, so that each is met again; other data are taken whole", "ours")
    zero_hop: bool = setting(True, "tiny data: a third of the questions says itself what is asked for; off: one and two look-ups, as Search-R1's", "ours")
    corpus: str = setting("", "corpus.jsonl in Search-R1's format, or the URL of a retriever (search; needed unless data is tiny)", "paper §4.1")
    eval_data: str = setting("", "held-out questions, as --data (default: split off from the training questions)", "ours")
    eval_questions: int = setting(200, "held-out questions", "ours")
    eval_every: int = setting(10, "evaluate every so many steps, and before and after (greedy, same questions); 0: only before and after", "ours")
    save_every: int = setting(20, "checkpoint every so many steps", "code scripts/nq_hotpotqa/v0.2/")
    keep_trajectories: int = setting(4, "trajectories a step that are written to trajectories.jsonl", "ours")
    template: str = setting("", "file with another prompt; it must hold {question}", "ours")
    # rollout
    prompts: int = setting(12, "questions per step", "code scripts/nq_hotpotqa/v0.2/")
    samples: int = setting(8, "trajectories per question (GRPO's group size; PPO uses 1)", "code train_grpo.sh")
    max_turns: int = setting(3, "turns whose call is run; one more turn may answer", "paper §4.1")
    topk: int = setting(2, "search: passages per search", "code scripts/nq_hotpotqa/v0.2/")
    sandbox: str = setting("isolated", "code: where programs run: isolated, unsafe, or the URL of a SandboxFusion server", "ours")
    run_timeout: float = setting(5.0, "code: longest run of a program", "code sandbox/server/sandbox_api.py (SandboxFusion)", "seconds")
    temperature: float = setting(1.0, "sampling temperature, no top-p", "code scripts/nq_hotpotqa/v0.2/")
    prompt_tokens: int = setting(256, "longest prompt; longer ones are skipped and counted", "code train_ppo.sh", "tokens")
    turn_tokens: int = setting(40, "longest model turn", "code train_ppo.sh", "tokens")
    observation_tokens: int = setting(160, "longest tool result", "code train_ppo.sh", "tokens")
    observation_chars: int = setting(256, "code: output of this length or more keeps its first and last half only", "code vllm_rollout_spmd.py", "characters")
    trajectory_tokens: int = setting(512, "longest trajectory after the prompt", "code train_ppo.sh", "tokens")
    # reward
    tool_reward: Literal["multiply", "add", "off"] = setting("multiply", "how thrift enters: times right, plus right, or not at all", "paper §3.3")
    alpha: float = setting(1.0, "weight of the tool reward", "paper §4.1")
    c: float = setting(0.0, "smoothing of the tool reward; 0: the limit of calls, max_turns", "paper §4.1")
    # learning
    algorithm: Literal["grpo", "ppo"] = setting("grpo", "group-relative advantages, or a critic", "paper §3.3")
    mask_observations: bool = setting(True, "leave what the model did not write (results, notices) out of the policy's loss", "code scripts/nq_hotpotqa/v0.2/")
    gae_over_documents: bool = setting(True, "PPO: GAE, whitening and value loss see document tokens, as the original; off: skip them", "code core_algos.py")
    aggregation: Literal["token", "sequence", "constant"] = setting("token", "mean of the loss over tokens, over sequences, or Dr. GRPO's constant", "code dp_actor.py")
    updates: int = setting(1, "optimiser steps per rollout batch", "code train_grpo.sh")
    lr: float = setting(3e-4, "learning rate of the policy (AdamW)", "code train_grpo.sh")
    warmup_steps: int = setting(3, "linear warm-up of the policy's rate", "code scripts/nq_hotpotqa/v0.2/", "steps")
    critic_lr: float = setting(1e-3, "learning rate of the critic", "code train_ppo.sh")
    critic_warmup_steps: int = setting(0, "linear warm-up of the critic's rate", "code scripts/nq_hotpotqa/v0.2/", "steps")
    weight_decay: float = setting(0.01, "AdamW weight decay", "code ppo_trainer.yaml")
    max_grad_norm: float = setting(1.0, "gradient clipping", "code ppo_trainer.yaml")
    clip: float = setting(0.2, "clip range of the policy ratio, both sides", "code ppo_trainer.yaml")
    value_clip: float = setting(0.5, "clip range of the critic", "code ppo_trainer.yaml")
    gamma: float = setting(1.0, "discount", "code ppo_trainer.yaml")
    lam: float = setting(1.0, "GAE lambda", "code ppo_trainer.yaml")
    kl: float = setting(0.0, "KL coefficient: k3 in the loss (GRPO), k1 in the reward (PPO)", "code scripts/nq_hotpotqa/v0.2/")
    entropy: float = setting(0.0, "entropy bonus", "code ppo_trainer.yaml")
    importance_cap: float = setting(0.0, "cap of the sampler/trainer importance correction; 0: off", "ours")
    micro_tokens: int = setting(12288, "padded tokens per micro-batch; the gradient does not depend on it", "ours", "tokens")
    gradient_checkpointing: bool = setting(False, "keep only every layer's input for the backward pass, and compute the rest again", "ours")
    optimizer_bf16: bool = setting(False, "keep AdamW's running means in bfloat16, rounded at random: half their memory", "ours")
    optimizer_offload: bool = setting(False, "keep AdamW's running means in the CPU's memory", "ours")
    # another start (not part of the paper)
    over_caller: int = setting(0, "tiny data: supervised steps before RL on right traces with needless calls; 0: none", "ours")
    over_caller_lr: float = setting(1e-3, "peak learning rate of these steps, then a cosine", "ours")


PRESETS = {
    "tiny": {},
    "paper": dict(  # 7B, search and GRPO as Search-R1's scripts, whose settings the paper keeps; for PPO add --algorithm ppo --samples 1 --updates 2,
        # for code --task code --max-turns 3 and ToRL's model, data, lengths, prompts and samples, --updates 1 --kl 0 --entropy 0 --warmup-steps 0
        model="Qwen/Qwen2.5-7B", device="cuda", data="PeterJinGo/nq_hotpotqa_train", corpus="http://127.0.0.1:8000", steps=1005, prompts=512,
        samples=5, max_turns=4, topk=3, run_timeout=10.0, prompt_tokens=2048, turn_tokens=500, observation_tokens=500, trajectory_tokens=4096,
        updates=10, lr=1e-6, warmup_steps=286, critic_lr=1e-5, critic_warmup_steps=15, kl=0.001, entropy=0.001, eval_questions=500,
        eval_every=50, save_every=100, micro_tokens=16384, gradient_checkpointing=True),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# Search: one user message (paper App. C). Programs: ToRL's plain dialogue.
PROMPTS = {
    "search": (
        "Answer the question below. Reason between <think> and </think> first, every time you get new information. Only when "
        "knowledge is missing, call the search engine with <search> query </search>; it returns the best results between <observation> "
        "and </observation>. Make every call count. When nothing more is needed, give the answer between <answer> and </answer>, "
        "without explanation. For example, <answer> and your answer </answer>. Question: {question}\n"),
    "code": (
        "A dialogue in which the User asks and the Assistant solves the problem.\nUser: Combine reasoning in words with Python programs. "
        "Put the final answer in \\boxed{}.\n{question}\nAssistant:\n"),
}
STOPS = {"search": ("</search>", "</answer>"), "code": ("```output",)}


def render(example: Example, tokenizer, template: str, task: str) -> str:
    """The prompt text: search through the chat template if the tokenizer has one, code raw."""
    question = example.question.strip()
    if task == "code":
        return template.replace("{question}", question)
    text = template.replace("{question}", question if question.endswith("?") else question + "?")
    if tokenizer.chat_template is None:
        return text
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)


# ---- Environment ------------------------------------------------------------------------------------------------------
NOTICE = ("\nThat was not a valid action. Put a query between <search> and </search>, or the final answer between <answer> and "
          "</answer>. Try again.\n")


def parse_action(text: str) -> tuple[str, str | None, str]:
    """(kept text, "search" | "answer" | None, content) of one turn, as code search_r1/llm_agent/generation.py: cut after the first
    </search>, else after the first </answer>; then the first search or answer pair counts."""
    for closer in STOPS["search"]:
        if closer in text:
            text = text[:text.index(closer) + len(closer)]
            break
    pair = re.search(r"<(search|answer)>(.*?)</\1>", text, re.S)
    return (text, pair[1], pair[2].strip()) if pair else (text, None, "")


def render_passages(passages: list[Passage]) -> str:
    return "".join(f"Doc {i}(Title: {neutralise(p.title)}) {neutralise(p.text)}\n" for i, p in enumerate(passages, 1))


def wrap_passages(text: str) -> str:
    return f"\n\n<observation>{text.strip()}</observation>\n\n"


def search_environment(turn: Turn, trajectory: Trajectory) -> Call | Notice | End:
    """One model turn: run a search, end at an answer, or insert a notice (which costs a turn like a search does)."""
    _, action, content = parse_action(turn.text)
    if action == "answer":
        return End("answer")
    if action == "search" and turn.reason == "stop":
        return Call("search", content, wrap_passages)
    return Notice(NOTICE)


NO_OUTPUT, NO_PROGRAM = "[no output]", "[no program]"


def extract_program(text: str) -> str | None:
    """The last block of a turn that opens with a line beginning or ending with ```python and is closed by a line beginning with ```;
    None if there is none (code vllm_rollout_spmd.py). ```py does not open a block, an indented fence does not close one."""
    program, lines = None, None
    for line in text.removesuffix("```output").split("\n"):  # the stop string closes nothing
        if lines is None:
            if line.strip().startswith("```python") or line.rstrip().endswith("```python"):
                lines = []
        elif line.startswith("```"):
            program, lines = "".join(x + "\n" for x in lines), None
        else:
            lines.append(line)
    return program


def observe(outcome: Outcome, limit: int = 256) -> str | ToolFailure:
    """What the model is shown of a program that ran: its output, or the last line of its error (code vllm_rollout_spmd.py)."""
    ran = outcome.kind in ("ok", "ok_empty")
    text = (outcome.stdout if ran else outcome.exception).strip()
    if len(text) >= limit:
        text = text[:limit // 2] + "..." + text[-(limit // 2):]
    return neutralise(text) if ran else ToolFailure(neutralise(text), outcome.kind)


def wrap_output(text: str) -> str:
    return f"\n{text or NO_OUTPUT}\n```\n"


def code_environment(turn: Turn, trajectory: Trajectory) -> Call | Notice | End:
    """One model turn: run its last program; without one, a note closes the output block (which costs a turn like a program does)."""
    if turn.reason != "stop":
        return End("answer" if turn.reason == "eos" else "length")
    program = extract_program(turn.text)
    return Notice(wrap_output(NO_PROGRAM)) if program is None else Call("python", program, wrap_output)


# ---- Reward -----------------------------------------------------------------------------------------------------------
def grade(trajectory: Trajectory, example: Example, cfg: Config) -> dict[str, float]:
    """Whether the answer is right, 1 or 0, as Search-R1 (exact match) or ToRL (equality of maths) would say; scores the model's words only; f1 and
    answered are for the metrics."""
    text = trajectory.model_text
    if cfg.task == "code":
        answer = last_boxed(text)
        right = answer is not None and maths_equal(pred=answer, gold=example.answers[0])
        return {"accuracy": float(right), "answered": float(answer is not None), "code": float("```python" in text)}
    pairs = re.findall(r"<answer>(.*?)</answer>", text, re.S)
    answer = pairs[-1].strip() if pairs else None
    return {"em": scoring.exact_match(pred=answer, gold=example.answers) if answer is not None else 0.0,
            "f1": scoring.f1(pred=answer, gold=example.answers) if answer is not None else 0.0, "answered": float(answer is not None)}


class FewestCalls:
    """n of every question: the fewest calls of a right answer so far, over all epochs (paper §4.1, the global variant)."""

    def __init__(self):
        self.n: dict[str, int] = {}

    def see(self, example: Example, calls: int) -> None:
        """A right answer with this many calls."""
        self.n[example.id] = min(calls, self.n.get(example.id, calls))

    def state_dict(self) -> dict:
        return {"n": self.n}

    def load_state_dict(self, state: dict) -> None:
        self.n = dict(state["n"])


def tool_reward(m: int, n: int | None, c: float) -> float:
    """Between 0 and 1, for m calls (paper eq. 5 to 7). n: the fewest calls of a right answer; None: not known, as in PPO."""
    if not n:  # eq. 5; and eq. 6 where no call is needed: 1 for m = 0
        return math.cos(m * math.pi / (2 * m + c))
    return math.sin(m * math.pi / (m + n))  # = sin(f pi / 2n) with f = 2nm / (m + n)


def reward(graded: dict[str, float], calls: int, n: int | None, cfg: Config) -> dict[str, float]:
    """Named parts of the reward and their total (paper eq. 4)."""
    right = graded["accuracy" if cfg.task == "code" else "em"]
    thrift = cfg.alpha * tool_reward(calls, n, cfg.c or max(1, cfg.max_turns))
    return {**graded, "total": {"multiply": thrift * right, "add": thrift + right, "off": right}[cfg.tool_reward]}


# ---- Train ------------------------------------------------------------------------------------------------------------
def load_data(cfg: Config) -> tuple[list[Example], list[Example]]:
    """(training questions, held-out questions)."""
    if cfg.data == "tiny":
        if cfg.task == "code":
            return problems("train", cfg.train_questions, cfg.seed), problems("eval", cfg.eval_questions)
        hops = (0, 1, 2) if cfg.zero_hop else (1, 2)
        return questions("train", cfg.train_questions, cfg.seed, hops), questions("eval", cfg.eval_questions, hops=hops)
    if cfg.task == "search" and not cfg.corpus:
        raise UserError("questions other than the tiny world's need --corpus (a corpus.jsonl or a retriever's URL)")
    return training_and_held_out(cfg.data, cfg.eval_data, cfg.eval_questions, trains=not cfg.evaluate)


def train(cfg: Config) -> None:
    cfg = saved_config(Config, cfg.evaluate, cfg) if cfg.evaluate else cfg
    if cfg.plan:
        return print_plan(cfg, response_tokens=cfg.trajectory_tokens, turns=cfg.max_turns + 1, reference=cfg.kl > 0, critic=cfg.algorithm == "ppo")
    search, stop, metric = cfg.task == "search", STOPS[cfg.task], "em" if cfg.task == "search" else "accuracy"
    sandbox = None if search else open_sandbox(cfg.sandbox, Limits(wall_s=cfg.run_timeout))  # first: its server is forked before torch has threads
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    (scoring.self_test if search else maths_self_test)()
    template = read_template(cfg.template, PROMPTS[cfg.task], "{question}")
    train_set, eval_set = load_data(cfg)
    model, tokenizer = load_model(cfg.model, cfg.dtype, cfg.device, cfg.gradient_checkpointing)
    group = cfg.samples if cfg.algorithm == "grpo" else 1
    n_prompts = cfg.prompts * cfg.samples // group
    reference = load_model(cfg.model, cfg.dtype, cfg.device)[0] if cfg.kl else None
    critic = Critic(model) if cfg.algorithm == "ppo" else None
    shard(model, reference, critic)  # over the ranks, where there are several
    optimizer = make_optimizer(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    critic_optimizer = make_optimizer(critic.parameters(), cfg.critic_lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16,
                                      offload=cfg.optimizer_offload) if critic else None
    budget = Budget(cfg.prompt_tokens, cfg.turn_tokens, cfg.observation_tokens, cfg.trajectory_tokens, cfg.max_turns)
    engine = make_engine(cfg.engine, model, tokenizer, max_slots=max(n_prompts * group, min(cfg.eval_questions, 256)),
                         max_length=cfg.prompt_tokens + cfg.trajectory_tokens)
    tools, pool = {"search": search_tool(cfg.corpus, cfg.topk, render_passages)} if search else {
        "python": python_tool(sandbox, lambda outcome: observe(outcome, cfg.observation_chars))}, ToolPool()
    environment, fewest = search_environment if search else code_environment, FewestCalls()
    prompts_of = lambda examples: make_prompts(examples, lambda e: render(e, tokenizer, template, cfg.task), tokenizer, budget)
    eval_prompts, _ = prompts_of(eval_set)

    def answer_eval() -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions, and their reward parts."""
        engine.sync(model)
        trajectories = rollout(engine, tokenizer, eval_prompts, environment, tools, budget, pool, temperature=0.0, stop=stop)
        return ranks.gather(trajectories), ranks.gather([reward(grade(t, t.example, cfg), len(t.calls), None, cfg) for t in trajectories])

    if cfg.evaluate:
        return print_evaluation(cfg.evaluate, metric, cfg, *answer_eval())
    run = Run(cfg, method="otc", metric=metric, total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)
    trained = {"model": model, "optimizer": optimizer, "fewest": fewest, **({"critic": critic, "critic_optimizer": critic_optimizer} if critic else {}),
               **({"reference": reference} if reference and cfg.over_caller else {})}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.before = run.log_eval(0, *answer_eval(), tokenizer)
        if cfg.over_caller:
            learn_to_over_call(cfg, model, tokenizer, template, run)
            run.log_eval(0, *answer_eval(), tokenizer)
            if reference:  # RL starts here, and stays near here
                reference.load_state_dict(model.state_dict())
            if critic:  # it starts where RL starts
                critic.body.load_state_dict(model.base_model.state_dict())

    for step in range(first, cfg.steps):
        # 1. sample
        clock = Clock()
        engine.sync(model)
        prompts, skipped = prompts_of([train_set[i] for i in order(cfg.seed, step, len(train_set), n_prompts)])
        trajectories = rollout(engine, tokenizer, prompts, environment, tools, budget, pool, samples=group, temperature=cfg.temperature,
                               stop=stop, seed=cfg.seed, step=step)
        clock.lap("sample_s")

        # 2. score
        graded = [grade(t, t.example, cfg) for t in trajectories]
        for example, calls in ranks.gather([(t.example, len(t.calls)) for t, g in zip(trajectories, graded) if g[metric]]):
            fewest.see(example, calls)
        n_of = lambda t: fewest.n.get(t.example.id) if cfg.algorithm == "grpo" else None
        parts = [reward(g, len(t.calls), n_of(t), cfg) for t, g in zip(trajectories, graded)]
        rewards_B = torch.tensor([p["total"] for p in parts], device=cfg.device)
        batch = collate(trajectories, cfg.device)
        trained_BT = batch.sampled_BT if cfg.mask_observations else batch.response_BT
        nan_BT = torch.full_like(batch.sampler_BT, torch.nan)
        score_with = lambda m: score(m, batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, temperature=cfg.temperature, micro_tokens=cfg.micro_tokens)
        old_BT = score_with(model) if cfg.updates > 1 or (critic and cfg.kl) else nan_BT
        ref_BT = score_with(reference) if reference else None

        # 3. advantages
        if cfg.algorithm == "grpo":
            advantages_BT = losses.group_advantages(rewards_B.view(-1, group)).view(-1, 1).expand_as(nan_BT)
        else:
            steps_BT = batch.response_BT if cfg.gae_over_documents else trained_BT
            rewards_BT = losses.rewards_at_end(rewards_B, steps_BT)
            if reference:  # k1 in the reward, on the trained tokens
                rewards_BT = rewards_BT - cfg.kl * losses.kl(old_BT, ref_BT, trained_BT & steps_BT, "k1")
            values_BT = values(critic, batch.ids_BT, batch.lengths_B, micro_tokens=cfg.micro_tokens)
            advantages_BT, returns_BT = losses.gae(rewards_BT, values_BT, steps_BT, cfg.gamma, cfg.lam)
            advantages_BT = losses.whiten(advantages_BT, steps_BT)
        clock.lap("logprob_s")

        # 4. update
        experience = Experience(batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, batch.sampled_BT, batch.sampler_BT, old_BT, advantages_BT, ref_BT)
        done = []
        for rows in mini_batches(len(trajectories), cfg.updates, seed=cfg.seed, step=step):
            done.append(policy_step(
                model, optimizer, experience, rows, lr=lr_at(step, cfg.steps, cfg.lr, cfg.warmup_steps), clip_low=cfg.clip, clip_high=cfg.clip,
                aggregation=cfg.aggregation, budget_tokens=budget.sampled_tokens, temperature=cfg.temperature,
                kl=cfg.kl if cfg.algorithm == "grpo" else 0.0, kl_kind="k3",
                entropy=cfg.entropy, importance_cap=cfg.importance_cap, micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm))
            if critic:
                done[-1] |= critic_step(critic, critic_optimizer, experience, rows, values_BT, returns_BT, steps_BT, value_clip=cfg.value_clip,
                                        lr=lr_at(step, cfg.steps, cfg.critic_lr, cfg.critic_warmup_steps), micro_tokens=cfg.micro_tokens,
                                        max_grad_norm=cfg.max_grad_norm)
        clock.lap("update_s")

        # 5. log, evaluate, save
        run.log_train(step + 1, trajectories, parts, experience, tokenizer, clock, engine, group,
                      {**joined(done), "skipped_prompts": skipped})
        if cfg.eval_every and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
            run.log_eval(step + 1, *answer_eval(), tokenizer)
        if run.signal or (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.save(step + 1, trained)
        run.stop_if_asked(step + 1)

    run.finish(run.log_eval(cfg.steps, *answer_eval(), tokenizer))
    save_policy(run.folder / "model", model, tokenizer)
    print(run.closing_line(write_report(run.folder)))
    if sandbox:
        sandbox.close()


# ---- A start that calls too much (ours) -------------------------------------------------------------------------------
def wasteful_trace(cfg: Config, number: int, end: str) -> tuple[Example, list[tuple[str, str]]]:
    """A question of worlds that no run uses, and segments by author that answer it rightly but dearly: two times in three a call is
    made twice, and two times in three what needs no call is looked up or computed."""
    rng = random.Random(f"wasteful {cfg.seed} {number}")
    if cfg.task == "code":
        p = problem(-1 - cfg.seed, number)
        program = f"I compute it.\n```python\nprint({p.expression})\n```\n```output"
        calls = [(program, p.answer)] * rng.choice((0, 1, 1) if p.easy else (1, 2, 2))
        example, answer = Example(p.id, p.text, (p.answer,)), f"Now I can answer. The answer is \\boxed{{{p.answer}}}.{end}"
    else:
        w = world(-1 - 1000 * cfg.seed - number // 64)
        entity = rng.choice(list(w.facts))
        q = w.question(number, number % 3, about=entity)
        names = [x for x, _ in q.hops] or [entity] * rng.choice((0, 1, 1))
        twice = [x for name in names for x in [name] * rng.choice((1, 2, 2))]
        calls = [(f"<think> I should look up {x}. </think>\n<search> {x} </search>",
                  render_passages([h.passage for h in w.index.search([x], cfg.topk)[0]])) for x in (twice if len(twice) <= cfg.max_turns else names)]
        example, answer = Example(q.id, q.text, (q.answer,)), f"<think> Now I can answer. </think>\n<answer> {q.answer} </answer>"
    return example, [s for said, result in calls for s in (("model", said), ("tool", result))] + [("model", answer)]


def learn_to_over_call(cfg: Config, model, tokenizer, template: str, run: Run) -> None:
    """Supervised steps on wasteful traces: the habit that the paper finds in models trained without a price on calls."""
    if cfg.data != "tiny":
        raise UserError("--over-caller is made of the tiny world's traces: it needs --data tiny")
    wrap = wrap_passages if cfg.task == "search" else wrap_output
    optimizer = make_optimizer(model.parameters(), cfg.over_caller_lr, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    for step in range(cfg.over_caller):
        traces = [wasteful_trace(cfg, 16 * step + i, tokenizer.eos_token) for i in range(16)]
        rows = [demonstration_row(render(e, tokenizer, template, cfg.task), segments, tokenizer, wrap, cfg.observation_tokens) for e, segments in traces]
        loss = supervised_step(model, optimizer, rows, lr=lr_at(step, cfg.over_caller, cfg.over_caller_lr, 10, schedule="cosine"), micro_tokens=cfg.micro_tokens,
                               max_grad_norm=cfg.max_grad_norm)
        run.log("warmup", 0, {"loss": loss})
        run.stop_if_asked(0)


if __name__ == "__main__":
    main(lambda: train(parse_config(Config, PRESETS)))
