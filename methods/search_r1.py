"""Search-R1: training a language model to reason and search, with retrieved text masked out of the loss.

Paper: "Search-R1: Training LLMs to Reason and Leverage Search Engines with Reinforcement Learning", arXiv 2503.09516 (v5); the
format-aware reward is from the follow-up arXiv 2505.15117. Code: github PeterGriffinJin/Search-R1 (commit a14dc3a).

The idea. A model that can call a search engine in the middle of its reasoning is trained with nothing but the exact match of its
final answer. The search results are part of its context but not its words, so their tokens are left out of the loss. Both PPO and
GRPO work on this; the paper finds that GRPO learns faster and PPO is steadier.

The method, step by step:
  1. `PROMPT` states the contract: <think>, <search>, <information>, <answer>.
  2. `environment` reads one model turn: the first search or answer pair counts; anything else gets a notice and costs a turn.
  3. `rollout` samples trajectories: at most `max_turns` turns with a search, then one last turn whose search is not run.
  4. `reward` compares the last answer with the gold answers (exact match), optionally with the format-aware rules.
  5. `train`: advantages from the group (GRPO) or from a critic (PPO, GAE over the trajectory).
  6. The clipped policy gradient runs over the tokens the model sampled, plus a small KL to the start model.

Kept from the paper: tags, rendering of passages, notice after an invalid action, budget, rewards, both algorithms, KL placement
(k1 in the reward for PPO, k3 in the loss for GRPO), advantage formulas, all hyper-parameters in the preset `paper`.
Changed, and why:
  - token in, token out: the original decodes, cuts and re-tokenises each turn (search_r1/llm_agent/generation.py), so the tokens it
    trains are not always those it sampled. We stop in the engine at </search> and </answer> and keep the ids.
  - the reward reads only text the model wrote (`score_scope`): the original reads prompt and results too, so the example answer of the
    prompt, or a tag pair inside a passage, can earn the reward (verl/utils/reward_score/qa_em.py).
  - a cut result keeps its closing tag: the original cuts at 500 tokens from the right and can lose </information>.
  - tags inside passages are made harmless; group ids come from sampling (the original groups by `index`, which collides across sets).
  - the loss has one denominator per update: the original takes token means of micro-batches, and their mean.

What to watch: `calls` goes to the number of look-ups a question needs; `em` follows; `zero_variance_groups` rises as the task is
learned; `sampler_ratio_*` stays at 1.

    make search_r1                                            # tiny model and world, a few minutes on two cores
    make search_r1 ARGS="--algorithm ppo --seed 1"
    make search_r1 ARGS="--no-mask-observations"              # the paper's ablation
    make search_r1 ARGS="--preset smollm2 --data questions.jsonl --corpus corpus.jsonl"
"""
import re
from dataclasses import dataclass
from typing import Literal

import torch

from common import UserError, losses, ranks, scoring
from common.data import Example, order, training_and_held_out
from common.engine import make_engine
from common.plan import print_plan
from common.policy import Critic, load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, Call, End, Notice, Tool, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.run import Clock, Run, main, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting
from common.search import Passage, neutralise
from common.tiny.world import questions
from common.tools import search_tool
from common.update import Experience, critic_step, joined, mini_batches, policy_step, score, values
from common.warmup import as_shown, found_by_rule, warm_up


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny, smollm2 or paper", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of data order and sampling", "ours")
    steps: int = setting(40, "optimisation steps (one rollout batch each)", "code scripts/nq_hotpotqa/v0.2/")
    resume: bool = setting(False, "go on with a run that was stopped or killed", "ours")
    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")
    evaluate: str = setting("", "folder of a finished run: evaluate its model again instead of training", "ours")
    plan: bool = setting(False, "instead of training, print what these settings need: memory per GPU, tokens, disk; nothing is loaded", "ours")
    # model and data
    model: str = setting("tiny", "tiny, smollm2, a folder, or a hub id", "paper §4.3")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "type of the weights", "ours")
    device: str = setting("cpu", "cpu or cuda", "ours")
    threads: int = setting(0, "CPU threads; 0: one per core", "ours")
    engine: Literal["hf", "vllm"] = setting("hf", "engine that samples: hf, or vllm (make setup_vllm)", "ours")
    data: str = setting("tiny", "training questions: tiny, a .jsonl, .json or .parquet file, or a hub data set id", "paper §4.3")
    corpus: str = setting("", "corpus.jsonl in Search-R1's format, or the URL of a retriever (needed unless data is tiny)", "paper §4.3")
    eval_data: str = setting("", "held-out questions, as --data (default: split off from the training questions)", "ours")
    eval_questions: int = setting(200, "held-out questions", "ours")
    eval_every: int = setting(10, "evaluate every so many steps, and before and after (greedy, same questions); 0: only before and after", "ours")
    save_every: int = setting(20, "checkpoint every so many steps", "code scripts/nq_hotpotqa/v0.2/")
    keep_trajectories: int = setting(4, "trajectories a step that are written to trajectories.jsonl", "ours")
    template: str = setting("", "file with another prompt; it must hold {question}", "ours")
    # rollout
    prompts: int = setting(12, "questions per step", "paper §4.3")
    samples: int = setting(8, "trajectories per question (GRPO's group size; PPO uses 1)", "code train_grpo.sh")
    max_turns: int = setting(3, "turns whose call is run; one more turn may answer", "paper App. B")
    topk: int = setting(2, "passages per search", "paper §4.3")
    temperature: float = setting(1.0, "sampling temperature, no top-p", "paper App. B")
    prompt_tokens: int = setting(256, "longest prompt; longer ones are skipped and counted", "code train_ppo.sh", "tokens")
    turn_tokens: int = setting(40, "longest model turn", "code train_ppo.sh", "tokens")
    observation_tokens: int = setting(160, "longest tool result", "code train_ppo.sh", "tokens")
    trajectory_tokens: int = setting(512, "longest trajectory after the prompt", "code train_ppo.sh", "tokens")
    # reward
    reward: Literal["em", "subem", "format"] = setting("em", "exact match, substring match, or the format-aware reward", "paper §3.4")
    structure_score: float = setting(0.2, "format reward: value of a valid structure", "code scripts/nq_hotpotqa/v0.3/")
    final_format_score: float = setting(0.1, "format reward: value of an answer in invalid structure", "code scripts/nq_hotpotqa/v0.3/")
    retrieval_score: float = setting(0.0, "format reward: added when a gold answer was retrieved", "code scripts/nq_hotpotqa/v0.3/")
    score_scope: Literal["model", "response", "all"] = setting(
        "model", "text the reward reads: what the model wrote; with results and notices; with the prompt too, as the original (tags in results are "
        "harmless either way)", "code qa_em.py", published="all")
    # learning
    algorithm: Literal["grpo", "ppo"] = setting("grpo", "group-relative advantages, or a critic", "paper §3.1")
    mask_observations: bool = setting(True, "leave what the model did not write (results, notices) out of the policy's loss", "paper §3.2")
    gae_over_documents: bool = setting(True, "PPO: GAE, whitening and value loss see document tokens, as the original; off: skip them", "code core_algos.py")
    aggregation: Literal["token", "sequence", "constant"] = setting("token", "mean of the loss over tokens, over sequences, or Dr. GRPO's constant", "code dp_actor.py")
    updates: int = setting(1, "optimiser steps per rollout batch", "code train_grpo.sh")
    lr: float = setting(3e-4, "learning rate of the policy (AdamW)", "code train_grpo.sh")
    warmup_steps: int = setting(3, "linear warm-up of the policy's rate", "code scripts/nq_hotpotqa/v0.2/", "steps")
    critic_lr: float = setting(1e-3, "learning rate of the critic", "code train_ppo.sh")
    critic_warmup_steps: int = setting(0, "linear warm-up of the critic's rate", "code scripts/nq_hotpotqa/v0.2/", "steps")
    weight_decay: float = setting(0.01, "AdamW weight decay", "code ppo_trainer.yaml")
    max_grad_norm: float = setting(1.0, "gradient clipping", "code ppo_trainer.yaml")
    clip: float = setting(0.2, "clip range of the policy ratio, both sides", "paper App. B")
    value_clip: float = setting(0.5, "clip range of the critic", "code ppo_trainer.yaml")
    gamma: float = setting(1.0, "discount", "paper App. B")
    lam: float = setting(1.0, "GAE lambda", "paper App. B")
    kl: float = setting(0.0, "KL coefficient: k3 in the loss (GRPO), k1 in the reward (PPO)", "paper App. B")
    entropy: float = setting(0.0, "entropy bonus", "code ppo_trainer.yaml")
    importance_cap: float = setting(0.0, "cap of the sampler/trainer importance correction; 0: off", "ours")
    micro_tokens: int = setting(12288, "padded tokens per micro-batch; the gradient does not depend on it", "ours", "tokens")
    gradient_checkpointing: bool = setting(False, "keep only every layer's input for the backward pass, and compute the rest again", "ours")
    optimizer_bf16: bool = setting(False, "keep AdamW's running means in bfloat16, rounded at random: half their memory", "ours")
    optimizer_offload: bool = setting(False, "keep AdamW's running means in the CPU's memory", "ours")
    # supervised warm-up (not part of the paper)
    warmup: int = setting(0, "supervised steps on traces built by rule, before RL", "ours")
    warmup_traces: int = setting(48, "traces for the warm-up", "ours")
    warmup_lr: float = setting(1e-4, "learning rate of the warm-up", "ours")


PRESETS = {
    "tiny": {},
    "smollm2": dict(  # a real 135 M model on a CPU: short everything
        model="smollm2", data="", steps=30, prompts=4, samples=4, max_turns=2, topk=2, prompt_tokens=320, turn_tokens=64,
        observation_tokens=192, trajectory_tokens=512, lr=2e-5, reward="format", warmup=12, eval_questions=24, eval_every=0, save_every=5, micro_tokens=2048),
    "paper": dict(  # 7B, GRPO as train_grpo.sh; for PPO add --algorithm ppo --prompts 512 --samples 1 --updates 2
        model="Qwen/Qwen2.5-7B", device="cuda", data="PeterJinGo/nq_hotpotqa_train", corpus="http://127.0.0.1:8000",
        steps=1005, prompts=512, samples=5, max_turns=4, topk=3, prompt_tokens=2048, turn_tokens=500, observation_tokens=500,
        trajectory_tokens=4096, updates=10, lr=1e-6, warmup_steps=286, critic_lr=1e-5, critic_warmup_steps=15, kl=0.001, entropy=0.001,
        eval_questions=500, eval_every=50, save_every=100, micro_tokens=16384, gradient_checkpointing=True),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# One user message for base and instruct models alike (code scripts/data_process/nq_search.py); a `?` is added where it is missing.
PROMPT = (
    "Answer the question below. Reason between <think> and </think> first, every time you get new information. When you lack "
    "knowledge, call the search engine with <search> query </search>; it returns the best results between <information> and "
    "</information>. You may search as many times as you want. When nothing more is needed, give the answer between <answer> and "
    "</answer>, without explanation. For example, <answer> Beijing </answer>. Question: {question}\n")
STOP = ("</search>", "</answer>")


def render(example: Example, tokenizer, template: str = PROMPT) -> str:
    """The prompt text: through the chat template if the tokenizer has one (code dataset/rl_dataset.py), raw otherwise."""
    question = example.question.strip()
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
    for closer in STOP:
        if closer in text:
            text = text[:text.index(closer) + len(closer)]
            break
    pair = re.search(r"<(search|answer)>(.*?)</\1>", text, re.S)
    return (text, pair[1], pair[2].strip()) if pair else (text, None, "")


def render_passages(passages: list[Passage]) -> str:
    return "".join(f"Doc {i}(Title: {neutralise(p.title)}) {neutralise(p.text)}\n" for i, p in enumerate(passages, 1))


def wrap_passages(text: str) -> str:
    return f"\n\n<information>{text.strip()}</information>\n\n"


def environment(turn: Turn, trajectory: Trajectory) -> Call | Notice | End:
    """One model turn: run a search, end at an answer, or insert a notice (which costs a turn like a search does)."""
    _, action, content = parse_action(turn.text)
    if action == "answer":
        return End("answer")
    if action == "search" and turn.reason == "stop":
        return Call("search", content, wrap_passages)
    return Notice(NOTICE)


# ---- Reward -----------------------------------------------------------------------------------------------------------
BLOCKS = "think|search|information|answer"
INSIDE = rf"(?:(?!</?(?:{BLOCKS})>).)*"  # text without any of the tags
VALID = re.compile(rf"\s*<think>{INSIDE}</think>\s*(?:<search>{INSIDE}</search>\s*<information>{INSIDE}</information>\s*<think>{INSIDE}</think>\s*)*"
                   rf"<answer>{INSIDE}</answer>\s*", re.S)
ASSISTANT = "<|im_start|>assistant"


def extract_answer(text: str, at_least: int = 1) -> str | None:
    """Content of the last answer pair; None if there are fewer than `at_least` pairs. The original asks for two, because its prompt
    holds pairs itself (code verl/utils/reward_score/qa_em.py)."""
    pairs = re.findall(r"<answer>(.*?)</answer>", text, re.S)
    return pairs[-1].strip() if len(pairs) >= at_least else None


def valid_structure(trajectory: Trajectory, scope: str) -> bool:
    """Think, then any number of (search, information, think), then answer, and nothing but white space between the blocks.

    The original looks behind the first assistant header of the whole text and so never finds a structure without a chat template
    (code qa_em_format.py); in the other scopes a result block counts only where the search wrote it."""
    if scope == "all":
        return VALID.fullmatch((trajectory.prompt + trajectory.response).partition(ASSISTANT)[2]) is not None
    return "<information>" not in trajectory.model_text and VALID.fullmatch(trajectory.response) is not None


def reward(trajectory: Trajectory, example: Example, cfg: Config) -> dict[str, float]:
    """Named parts of the reward and their total (code qa_em.py, qa_em_format.py); em, f1 and answered are for the metrics."""
    whole = trajectory.prompt + trajectory.response
    text = {"model": trajectory.model_text, "response": trajectory.response, "all": whole}[cfg.score_scope]
    answer = extract_answer(text, at_least=2 if cfg.score_scope == "all" else 1)
    match = scoring.substring_match if cfg.reward == "subem" else scoring.exact_match
    right = match(pred=answer, gold=example.answers) if answer is not None else 0.0
    parts = {"em": scoring.exact_match(pred=answer, gold=example.answers) if answer is not None else 0.0,
             "f1": scoring.f1(pred=answer, gold=example.answers) if answer is not None else 0.0, "answered": float(answer is not None)}
    if cfg.reward != "format":
        return {**parts, "total": right}
    valid = valid_structure(trajectory, cfg.score_scope)
    results = re.findall(r"<information>(.*?)</information>", whole, re.S) if cfg.score_scope == "all" else \
        [s.text for s in trajectory.segments if s.author == "tool"]
    retrieved = any(scoring.substring_match(pred=block, gold=example.answers) for block in results)
    if right:
        total = 1.0 if valid else 1.0 - cfg.structure_score
    elif valid:
        total = cfg.structure_score + cfg.retrieval_score * retrieved
    else:
        total = cfg.final_format_score if answer is not None else 0.0
    return {**parts, "valid": float(valid), "retrieved": float(retrieved), "total": total}


# ---- Train ------------------------------------------------------------------------------------------------------------
def load_data(cfg: Config) -> tuple[list[Example], list[Example]]:
    """(training questions, held-out questions)."""
    if cfg.data == "tiny":
        return questions("train", 4096, cfg.seed), questions("eval", cfg.eval_questions)
    if not cfg.corpus:
        raise UserError("questions other than the tiny world's need --corpus (a corpus.jsonl or a retriever's URL)")
    return training_and_held_out(cfg.data, cfg.eval_data, cfg.eval_questions, trains=not cfg.evaluate)


def train(cfg: Config) -> None:
    cfg = saved_config(Config, cfg.evaluate, cfg) if cfg.evaluate else cfg
    if cfg.plan:
        return print_plan(cfg, response_tokens=cfg.trajectory_tokens, turns=cfg.max_turns + 1, reference=cfg.kl > 0, critic=cfg.algorithm == "ppo")
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    scoring.self_test()
    template = read_template(cfg.template, PROMPT, "{question}")
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
    tools, pool = {"search": search_tool(cfg.corpus, cfg.topk, render_passages)}, ToolPool()
    prompts_of = lambda examples: make_prompts(examples, lambda e: render(e, tokenizer, template), tokenizer, budget)
    eval_prompts, _ = prompts_of(eval_set)

    def answer_eval() -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions, and their reward parts."""
        engine.sync(model)
        trajectories = rollout(engine, tokenizer, eval_prompts, environment, tools, budget, pool, temperature=0.0, stop=STOP)
        return ranks.gather(trajectories), ranks.gather([reward(t, t.example, cfg) for t in trajectories])

    if cfg.evaluate:
        return print_evaluation(cfg.evaluate, "em", cfg, *answer_eval())
    run = Run(cfg, method="search_r1", metric="em", total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)
    trained = {"model": model, "optimizer": optimizer, **({"critic": critic, "critic_optimizer": critic_optimizer} if critic else {}),
               **({"reference": reference} if reference and cfg.warmup else {})}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.before = run.log_eval(0, *answer_eval(), tokenizer)
        if cfg.warmup:
            search = as_shown(tools["search"], tokenizer, wrap_passages, cfg.observation_tokens)
            warm_up(cfg, model, tokenizer, train_set, lambda e: render(e, tokenizer, template),
                    lambda e: demonstration(e, search), wrap_passages, run)
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
                               stop=STOP, seed=cfg.seed, step=step)
        clock.lap("sample_s")

        # 2. score
        parts = [reward(t, t.example, cfg) for t in trajectories]
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


# ---- Supervised warm-up (ours) ----------------------------------------------------------------------------------------
def demonstration(example: Example, search: Tool) -> list[tuple[str, str]] | None:
    """A trace built by rule: search, then answer with the gold answer that a passage holds. (author, text) segments, or None where the
    rule finds nothing."""
    found = found_by_rule(example, search)
    if found is None:
        return None
    query, text, gold = found
    return [("model", f"<think> I should look up {query}. </think>\n<search> {query} </search>"), ("tool", text),
            ("model", f"<think> The results give the answer. </think>\n<answer> {gold} </answer>")]


if __name__ == "__main__":
    main(lambda: train(parse_config(Config, PRESETS)))
