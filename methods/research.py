"""ReSearch: searches as a part of the reasoning chain, learned by GRPO from the F1 of the answer, with a floor for good form.

Paper: "ReSearch: Learning to Reason with Search for LLMs via Reinforcement Learning", arXiv 2503.19470. Code: github Agent-RL/ReCall, branch
re-search (commit 4bdb872).

The idea. A model thinks, searches and reads in one unbroken text, and no one shows it how: there is no supervised stage. The reward is the word
F1 of a boxed answer; an answer in the right form that shares no word with a gold answer still gets 0.1, so that the form is learned first. Results
are part of the text but not of the loss.

The method, step by step:
  1. `PROMPTS` state the contract, <think>, <search>, <result>, <answer> with \\boxed{}: a plain dialogue (base), or a system message (instruct).
  2. `environment` reads one model turn: it stops at </search>, and what stands between the last pair of search tags is searched.
  3. `rollout` samples trajectories until the model ends its text itself or a budget is used up.
  4. `valid_format` checks the blocks, `boxed_answer` takes the last box of the answer block.
  5. `reward`: 0 for a bad form or an unfinished text, else F1, else the floor.
  6. `train`: advantages from the group (GRPO), clipped policy gradient over the sampled tokens, k3 KL to the start model in the loss.

Kept from the paper: tags, both prompts, stop string, rendering of passages, rewards, GRPO with one update per batch, all hyper-parameters in
the preset `paper`. Where paper and code differ, the code: it gives 0 to a right answer in a bad form, the paper F1 (`--format-rule paper`).
Changed, and why:
  - the form is judged on what the model wrote (`score_scope`): in the original a tag inside a passage spoils it, and a <result> block that
    the model invents passes for a search (src/verl/utils/reward_score/re_search.py).
  - `max_turns` is finite: the original limits tokens only, and a model that repeats an empty search would go on to the last of them.
  - any end token in the model's configuration ends its text: the original wants the tokenizer's, and gives 0 after the other one.
  - the loss has one denominator per update: the original takes token means of micro-batches, weighted by their sequences.
  - validation questions are split off from the training questions; the original draws 100 of the development set.

What to watch: `f1` and `calls` rise together; `reward_floor` says how many samples live on the floor, `floor_groups` how many of the
`zero_variance_groups`, which teach nothing, it makes.

    make research                                             # tiny model and world, a few minutes on two cores
    make research ARGS="--floor 0"                            # nothing for good form alone
    make research ARGS="--format-rule paper"                  # the paper's rule instead of the code's
    make research ARGS="--reward em"                          # another measure of the answer
    make research ARGS="--preset smollm2 --data questions.jsonl --corpus corpus.jsonl"
"""
import re
from dataclasses import dataclass
from typing import Literal

import torch

from common import UserError, losses, ranks, scoring
from common.data import Example, order, training_and_held_out
from common.engine import make_engine
from common.plan import print_plan
from common.policy import load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, Call, End, Tool, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.run import Clock, Run, main, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting
from common.search import Passage, neutralise
from common.tiny.world import questions
from common.tools import search_tool
from common.update import Experience, joined, mini_batches, policy_step, score
from common.warmup import as_shown, found_by_rule, warm_up


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny, smollm2 or paper", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of data order and sampling", "ours")
    steps: int = setting(40, "optimisation steps (one rollout batch each)", "code train_multi_node.sh")
    resume: bool = setting(False, "go on with a run that was stopped or killed", "ours")
    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")
    evaluate: str = setting("", "folder of a finished run: evaluate its model again instead of training", "ours")
    plan: bool = setting(False, "instead of training, print what these settings need: memory per GPU, tokens, disk; nothing is loaded", "ours")
    # model and data
    model: str = setting("tiny", "tiny, smollm2, a folder, or a hub id", "paper §3.1")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "type of the weights", "ours")
    device: str = setting("cpu", "cpu or cuda", "ours")
    threads: int = setting(0, "CPU threads; 0: one per core", "ours")
    engine: Literal["hf", "vllm"] = setting("hf", "engine that samples: hf, or vllm (make setup_vllm)", "ours")
    data: str = setting("tiny", "training questions: tiny, a .jsonl, .json or .parquet file, or a hub data set id", "paper §3.1")
    corpus: str = setting("", "corpus.jsonl in Search-R1's format, or the URL of a retriever (needed unless data is tiny)", "paper §3.1")
    eval_data: str = setting("", "held-out questions, as --data (default: split off from the training questions)", "ours")
    eval_questions: int = setting(200, "held-out questions", "code prepare_musique.py")
    eval_every: int = setting(10, "evaluate every so many steps, and before and after (greedy, same questions); 0: only before and after", "ours")
    save_every: int = setting(20, "checkpoint every so many steps", "ours")
    keep_trajectories: int = setting(4, "trajectories a step that are written to trajectories.jsonl", "ours")
    prompt_style: Literal["base", "instruct"] = setting("base", "plain dialogue, or system and user message through the chat template", "paper §2.2")
    template: str = setting("", "file with another prompt; base: it must hold {question}; instruct: the system message", "ours")
    # rollout
    prompts: int = setting(12, "questions per step", "paper App. B")
    samples: int = setting(8, "trajectories per question (GRPO's group size)", "paper App. B")
    max_turns: int = setting(3, "turns whose call is run; one more turn may answer (the original has no such limit)", "ours")
    topk: int = setting(2, "passages per search", "code vllm_rollout.py")
    temperature: float = setting(1.0, "sampling temperature, no top-p", "code vllm_rollout.py")
    prompt_tokens: int = setting(256, "longest prompt; longer ones are skipped and counted", "code train_multi_node.sh", "tokens")
    turn_tokens: int = setting(40, "longest model turn (the original: what is left of the trajectory)", "ours", "tokens")
    observation_tokens: int = setting(160, "longest tool result (the original: what is left of the trajectory)", "ours", "tokens")
    trajectory_tokens: int = setting(512, "longest trajectory after the prompt", "code train_multi_node.sh", "tokens")
    # reward
    reward: Literal["f1", "em", "cover_em"] = setting("f1", "measure of the answer: word F1, exact match, or all gold words in it", "paper §2.3")
    floor: float = setting(0.1, "reward of a wrong answer in good form; 0: none", "paper §2.3")
    format_rule: Literal["code", "paper"] = setting(
        "code", "a bad form or an unfinished text: gets 0 (code), or the measure of its answer all the same (paper)", "code re_search.py")
    score_scope: Literal["model", "response"] = setting(
        "model", "text the format is judged on: what the model wrote; with results too, as the original (tags in results are harmless either way)",
        "code re_search.py", published="response")
    # learning
    mask_observations: bool = setting(True, "leave what the model did not write (results, notices) out of the policy's loss", "paper §2.1")
    aggregation: Literal["token", "sequence", "constant"] = setting("token", "mean of the loss over tokens, over sequences, or Dr. GRPO's constant", "code dp_actor.py")
    updates: int = setting(1, "optimiser steps per rollout batch", "code train_multi_node.sh")
    lr: float = setting(3e-4, "learning rate of the policy (AdamW)", "paper App. B")
    warmup_steps: int = setting(3, "linear warm-up of the policy's rate", "code train_multi_node.sh", "steps")
    weight_decay: float = setting(0.01, "AdamW weight decay", "code ppo_trainer.yaml")
    max_grad_norm: float = setting(1.0, "gradient clipping", "code ppo_trainer.yaml")
    clip: float = setting(0.2, "clip range of the policy ratio, both sides", "code ppo_trainer.yaml")
    kl: float = setting(0.0, "KL coefficient: k3 in the loss", "paper App. B")
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
        model="smollm2", prompt_style="instruct", data="", steps=30, prompts=4, samples=4, max_turns=2, topk=2, prompt_tokens=320, turn_tokens=64,
        observation_tokens=192, trajectory_tokens=512, lr=2e-5, warmup=12, eval_questions=24, eval_every=0, save_every=5, micro_tokens=2048),
    "paper": dict(  # 7B base; two epochs of MuSiQue. For the other one add --model Qwen/Qwen2.5-7B-Instruct --prompt-style instruct
        model="Qwen/Qwen2.5-7B", device="cuda", data="RUC-NLPIR/FlashRAG_datasets:musique", corpus="research+http://127.0.0.1:8000", steps=154,
        prompts=256, samples=5, max_turns=32, topk=5, prompt_tokens=512, turn_tokens=8192, observation_tokens=8192, trajectory_tokens=8192, lr=1e-6,
        warmup_steps=0, kl=0.001, entropy=0.001, eval_questions=100, micro_tokens=16384, gradient_checkpointing=True),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# The same contract for both kinds of model (code template.py): raw text that ends with the Assistant's turn, or a system message.
CONTRACT = (
    "The Assistant thinks step by step and may use a Wikipedia search tool. It reasons "
    "between <think> and </think>, searches with <search> query </search>, reads between <result> and </result>, and ends between "
    "<answer> and </answer> with the exact answer in \\boxed{}. For example, <think> reasoning </think> <search> query </search> "
    "<result> results </result> <think> reasoning </think> <answer> The answer is \\[ \\boxed{answer} \\] </answer>.")
PROMPTS = {
    "base": f"A dialogue between User and Assistant. {CONTRACT} User: {{question}}. Assistant:",
    "instruct": f"You are the Assistant. {CONTRACT}",
}
STOP = ("</search>",)


def render(example: Example, tokenizer, template: str, style: str) -> str:
    """The prompt text: raw (base), or system and user message through the chat template (instruct). Nothing is prefilled."""
    question = example.question.strip()
    if style == "base":
        return template.replace("{question}", question)
    if tokenizer.chat_template is None:
        raise UserError("--prompt-style instruct needs a model with a chat template, and this one has none; use --prompt-style base")
    messages = [{"role": "system", "content": template}, {"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# ---- Environment ------------------------------------------------------------------------------------------------------
def parse_query(text: str) -> str:
    """What stands between the last </search> and the <search> before it; "" without one (code vllm_rollout.py)."""
    before = text.rpartition("</search>")[0]
    return before.rpartition("<search>")[2].strip() if "<search>" in before else ""


def render_passages(passages: list[Passage]) -> str:
    """Title line and text of each passage, a blank line between two; neither numbers nor other marks."""
    return "\n\n".join(neutralise(p.contents) for p in passages).strip()


def wrap_passages(text: str) -> str:
    return f" <result>\n{text}\n</result>"


def environment(turn: Turn, trajectory: Trajectory) -> Call | End:
    """One model turn: run a search, an empty one too, or end. There are no notices: whatever else the model does is its last turn."""
    if turn.reason == "stop":
        return Call("search", parse_query(turn.text), wrap_passages)
    if turn.reason == "eos":
        return End("answer" if "</answer>" in turn.text else "no_action")
    return End("length")


# ---- Reward -----------------------------------------------------------------------------------------------------------
MEASURES = {"f1": scoring.f1, "em": scoring.exact_match, "cover_em": scoring.cover_exact_match}
ASSISTANT = "<|im_start|>assistant\n"


def boxed_answer(text: str) -> str | None:
    r"""Content of the last box of the first answer block; None without a box that is closed. A box that is followed by a space takes the
    rest of the block (code re_search.py)."""
    block = re.search(r"<answer>(.*?)</answer>", text, re.S)
    if block is None:
        return None
    if "\\boxed " in block[1]:
        return block[1].rpartition("\\boxed ")[2].partition("$")[0]
    _, box, rest = block[1].rpartition("\\boxed")
    depth = 0
    for i, c in enumerate(rest if box and rest.startswith("{") else ""):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return rest[1:i]
    return None


def valid_format(text: str) -> bool:
    """Thoughts that are closed, one answer block with a box in it, and a closed result behind every search (code re_search.py).

    As in the original a model need not search, a </search> without its opener goes unnoticed, and text may follow the answer."""
    thoughts, answers = ([text.count(f"<{slash}{tag}>") for slash in ("", "/")] for tag in ("think", "answer"))
    block = re.search(r"<answer>(.*?)</answer>", text, re.S)
    if thoughts[0] != thoughts[1] or not thoughts[0] or answers != [1, 1] or not block or "\\boxed{" not in block[1] or "}" not in block[1]:
        return False
    while "<search>" in text:
        query, _, text = text.partition("<search>")[2].partition("<result>")
        _, closed, text = text.partition("</result>")
        if "</search>" not in query or not closed:
            return False
    return True


def reward(trajectory: Trajectory, example: Example, cfg: Config) -> dict[str, float]:
    """Named parts of the reward and their total (code re_search.py, paper §2.3); em, f1 and the like are for the metrics."""
    text, invented = trajectory.response, False
    if cfg.score_scope == "model":  # a result counts as a block, not with what stands in it, and only where the search wrote it
        text = "".join("<result></result>" if s.author == "tool" else s.text for s in trajectory.segments)
        invented = "<result>" in trajectory.model_text
    text, again, _ = text.partition(ASSISTANT if ASSISTANT in trajectory.prompt else "Assistant:")  # a second turn of a dialogue it makes up
    answer = boxed_answer(text)
    measured = {name: measure(pred=answer, gold=example.answers) if answer is not None else 0.0 for name, measure in MEASURES.items()}
    valid, finished = valid_format(text) and not invented, trajectory.stop in ("answer", "no_action") and not again
    good = valid and answer is not None and (finished or cfg.format_rule == "paper")
    right = measured[cfg.reward] if good or cfg.format_rule == "paper" else 0.0
    floor = good and right == 0  # an F1 below the floor stays as it is
    return {"em": measured["em"], "f1": measured["f1"], "answered": float(answer is not None), "valid": float(valid), "finished": float(finished),
            "floor": float(floor), "total": cfg.floor if floor else right}


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
        return print_plan(cfg, response_tokens=cfg.trajectory_tokens, turns=cfg.max_turns + 1, reference=cfg.kl > 0)
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    scoring.self_test()
    template = read_template(cfg.template, PROMPTS[cfg.prompt_style], *(["{question}"] if cfg.prompt_style == "base" else []))
    train_set, eval_set = load_data(cfg)
    model, tokenizer = load_model(cfg.model, cfg.dtype, cfg.device, cfg.gradient_checkpointing)
    group, n_prompts = cfg.samples, cfg.prompts
    reference = load_model(cfg.model, cfg.dtype, cfg.device)[0] if cfg.kl else None
    shard(model, reference)  # over the ranks, where there are several
    optimizer = make_optimizer(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    budget = Budget(cfg.prompt_tokens, cfg.turn_tokens, cfg.observation_tokens, cfg.trajectory_tokens, cfg.max_turns)
    engine = make_engine(cfg.engine, model, tokenizer, max_slots=max(n_prompts * group, min(cfg.eval_questions, 256)),
                         max_length=cfg.prompt_tokens + cfg.trajectory_tokens)
    tools, pool = {"search": search_tool(cfg.corpus, cfg.topk, render_passages)}, ToolPool()
    prompts_of = lambda examples: make_prompts(examples, lambda e: render(e, tokenizer, template, cfg.prompt_style), tokenizer, budget)
    eval_prompts, _ = prompts_of(eval_set)

    def answer_eval() -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions, and their reward parts."""
        engine.sync(model)
        trajectories = rollout(engine, tokenizer, eval_prompts, environment, tools, budget, pool, temperature=0.0, stop=STOP)
        return ranks.gather(trajectories), ranks.gather([reward(t, t.example, cfg) for t in trajectories])

    if cfg.evaluate:
        return print_evaluation(cfg.evaluate, "f1", cfg, *answer_eval())
    run = Run(cfg, method="research", metric="f1", total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)
    trained = {"model": model, "optimizer": optimizer, **({"reference": reference} if reference and cfg.warmup else {})}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.before = run.log_eval(0, *answer_eval(), tokenizer)
        if cfg.warmup:
            search = as_shown(tools["search"], tokenizer, wrap_passages, cfg.observation_tokens)
            warm_up(cfg, model, tokenizer, train_set, lambda e: render(e, tokenizer, template, cfg.prompt_style),
                    lambda e: demonstration(e, search, tokenizer.eos_token), wrap_passages, run)
            run.log_eval(0, *answer_eval(), tokenizer)
            if reference:  # RL starts here, and stays near here
                reference.load_state_dict(model.state_dict())

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
        old_BT = score_with(model) if cfg.updates > 1 else nan_BT
        ref_BT = score_with(reference) if reference else None

        # 3. advantages
        advantages_BT = losses.group_advantages(rewards_B.view(-1, group)).view(-1, 1).expand_as(nan_BT)
        clock.lap("logprob_s")

        # 4. update
        experience = Experience(batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, batch.sampled_BT, batch.sampler_BT, old_BT, advantages_BT, ref_BT)
        done = []
        for rows in mini_batches(len(trajectories), cfg.updates, seed=cfg.seed, step=step):
            done.append(policy_step(
                model, optimizer, experience, rows, lr=lr_at(step, cfg.steps, cfg.lr, cfg.warmup_steps), clip_low=cfg.clip, clip_high=cfg.clip,
                aggregation=cfg.aggregation, budget_tokens=budget.sampled_tokens, temperature=cfg.temperature, kl=cfg.kl, kl_kind="k3",
                entropy=cfg.entropy, importance_cap=cfg.importance_cap, micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm))
        clock.lap("update_s")

        # 5. log, evaluate, save
        floor_PG = torch.tensor([p["floor"] for p in parts]).view(-1, group)
        run.log_train(step + 1, trajectories, parts, experience, tokenizer, clock, engine, group,
                      {**joined(done), "skipped_prompts": skipped, "floor_groups": ranks.mean((floor_PG == 1).all(1).float())})
        if cfg.eval_every and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
            run.log_eval(step + 1, *answer_eval(), tokenizer)
        if run.signal or (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.save(step + 1, trained)
        run.stop_if_asked(step + 1)

    run.finish(run.log_eval(cfg.steps, *answer_eval(), tokenizer))
    save_policy(run.folder / "model", model, tokenizer)
    print(run.closing_line(write_report(run.folder)))


# ---- Supervised warm-up (ours) ----------------------------------------------------------------------------------------
def demonstration(example: Example, search: Tool, end: str) -> list[tuple[str, str]] | None:
    """A trace built by rule: search, then answer with the gold answer that a passage holds, and the end token. (author, text) segments, or
    None where the rule finds nothing."""
    found = found_by_rule(example, search)
    if found is None:
        return None
    query, text, gold = found
    return [("model", f"<think> I should look up {query}. </think>\n<search> {query} </search>"), ("tool", text),
            ("model", f"\n<think> The results give the answer. </think>\n<answer> The answer is \\[ \\boxed{{{gold}}} \\] </answer>{end}")]


if __name__ == "__main__":
    main(lambda: train(parse_config(Config, PRESETS)))
