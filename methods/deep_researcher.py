"""DeepResearcher: learning to research in the real web, by searching and by reading pages.

Paper: "DeepResearcher: Scaling Deep Research via Reinforcement Learning in Real-world Environments", arXiv 2504.03160. Code: github
GAIR-NLP/DeepResearcher (commit c93be8f).

The idea. A search engine shows titles, addresses and a line of each page; what a question asks for often stands only in the page itself. So
the model gets two tools, one that searches and one that reads pages, whose text a reading agent goes through portion by portion until it
knows enough. It learns when to use which with nothing but the word F1 of its final answer, and -1 where it breaks the format.

The method, step by step:
  1. `render`: a system prompt with the schemas of both tools, through the chat template; <think> is glued to every turn of the model.
  2. `parse_turn` reads one model turn: an answer ends, a call in JSON is run, and anything else ends too.
  3. `search_pages` gives titles, addresses and snippets, `browse_pages` what the reading agent found in pages.
  4. `rollout` samples trajectories of at most `max_turns` turns.
  5. `reward`: -1 if a tag has no partner or there is no answer, else the F1 of sets of words.
  6. `train`: advantages from the group (GRPO), clipped policy gradient over the tokens the model sampled, k3 KL in the loss.

Kept from the paper: tools, two forms of a turn, a malformed call ends the trajectory, three queries a search, only addresses that the last
search found, portions of 40,960 characters, reward, GRPO with 16 samples, all hyper-parameters in the preset `paper`.
Changed, and why:
  - token in, token out: the original renders calls anew from parsed JSON and tokenises the whole dialogue again at its end
    (scrl/llm_agent/generation.py); here turns stay as they were sampled, and the template's words between them are worked out once.
  - the <think> that is glued to a turn is not trained, as the model did not sample it; the original trains it.
  - the reward reads only what the model wrote (`score_scope`): in the original a tag in a web page costs -1 (format_and_f1.py).
  - a turn is read by itself: in the original an empty thought spoils the turns of the trajectories behind it in the batch.
  - results are JSON, not printed Python lists; tags in them are made harmless; time and size of pages are limited.
  - a page may be read again: the original shows an address once in a trajectory, ours once in a call.
  - before RL the preset smollm2 has a few supervised steps on traces built by rule, which the paper has not: it never keeps to the form by itself.
  - the word F1 that is reported reads the last turn and counts a broken format 0, not -1, as the original's evaluation does.

What to watch: `calls` rises to a search and a page for every look-up; `well_formed` comes first, `f1` follows; `call_ok` says how many
pages could be read.

    make deep_researcher                                      # tiny model and a small web on this machine, a few minutes on two cores
    make deep_researcher ARGS="--no-browse"                   # search alone: what stands only in pages stays unknown
    make deep_researcher ARGS="--preset smollm2 --data dev.parquet --search http://127.0.0.1:8001/search --allow 127.0.0.1:8001"
    SERPER_API_KEY=... OPENAI_API_KEY=... make deep_researcher ARGS="--preset paper"         # the second key is the reading agent's
"""
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Literal

import torch

from common import UserError, losses, ranks, scoring
from common.chat import next_user_turn
from common.data import Example, order, training_and_held_out
from common.engine import make_engine
from common.plan import print_plan
from common.policy import load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, Call, End, Segment, Tool, ToolCall, ToolFailure, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.run import Clock, Run, folder_of, main, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting
from common.search import neutralise
from common.tiny.world import questions
from common.update import Experience, joined, mini_batches, policy_step, score
from common.warmup import as_shown, gold_in, warm_up
from common.web import DiskCache, Fetcher, PageFailure, Reader, WebSearch, open_reader, read, tiny_web


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny, smollm2 or paper", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of data order and sampling", "ours")
    steps: int = setting(24, "optimisation steps (one rollout batch each)", "paper (training curves)")
    resume: bool = setting(False, "go on with a run that was stopped or killed", "ours")
    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")
    evaluate: str = setting("", "folder of a finished run: evaluate its model again instead of training", "ours")
    plan: bool = setting(False, "instead of training, print what these settings need: memory per GPU, tokens, disk; nothing is loaded", "ours")
    # model and data
    model: str = setting("tiny", "tiny, smollm2, a folder, or a hub id", "code train_grpo.sh")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "type of the weights", "ours")
    device: str = setting("cpu", "cpu or cuda", "ours")
    threads: int = setting(0, "CPU threads; 0: one per core", "ours")
    engine: Literal["hf", "vllm"] = setting("hf", "engine that samples: hf, or vllm (make setup_vllm)", "ours")
    data: str = setting("tiny", "training questions: tiny, a .jsonl, .json or .parquet file, or a hub data set id", "code train_grpo.sh")
    eval_data: str = setting("", "held-out questions, as --data (default: split off from the training questions)", "ours")
    eval_questions: int = setting(200, "held-out questions", "ours")
    eval_every: int = setting(10, "evaluate every so many steps, and before and after (greedy, same questions); 0: only before and after", "ours")
    save_every: int = setting(20, "checkpoint every so many steps", "ours")
    keep_trajectories: int = setting(4, "trajectories a step that are written to trajectories.jsonl", "ours")
    template: str = setting("", "file with another system prompt; it must hold {date}", "ours")
    date: str = setting("2025-01-01", "the day that the prompt names; today: the day on which the run begins (GMT)", "code generation.py")
    # the web
    search: str = setting("", "server of Serper's protocol (key: SERPER_API_KEY for Serper, else SEARCH_API_KEY); needed unless data is tiny", "code generation.py")
    allow: str = setting("tiny", "addresses that may be read although not public: 10.1.2.3, 10.0.0.0/8 or 127.0.0.1:8001, with commas; tiny: the tiny web's own", "ours")
    cache: str = setting("", "folder for search results and pages; empty: none are kept", "code generation.py")
    cache_days: float = setting(7.0, "days a kept result is good for", "code generation.py", "days")
    page_s: float = setting(10.0, "longest fetch of a page", "ours", "seconds")
    page_bytes: int = setting(4 << 20, "largest page, as sent and unpacked", "ours", "bytes")
    reader: str = setting("text", "who reads pages: text (they are passed on as they are), policy, a model (as --model), or an OpenAI-compatible endpoint (http...)", "code scrl/handler/ (reading agent)")
    reader_model: str = setting("", "name of the model at the endpoint; its key: OPENAI_API_KEY", "code scrl/handler/ (reading agent)")
    reader_tokens: int = setting(2048, "policy or model as reader: longest question with its portion of a page, and answer", "ours", "tokens")
    reader_answer_tokens: int = setting(256, "longest note of a reader", "ours", "tokens")
    portion_chars: int = setting(40960, "length of the portions in which a page is read", "code scrl/handler/ (reading agent)", "characters")
    portions: int = setting(10, "most portions of one page that are read", "ours")
    # rollout
    prompts: int = setting(6, "questions per step", "code train_grpo.sh")
    samples: int = setting(16, "trajectories per question (GRPO's group size)", "code train_grpo.sh")
    max_turns: int = setting(6, "turns in all; the call of the last one is not run", "code train_grpo.sh")
    answer_turn: bool = setting(False, "one more turn, so that max_turns calls and then an answer are possible", "paper (ten calls)", published=True)
    browse: bool = setting(True, "offer browse_webpage; off: search alone", "code generation.py (rag)")
    queries: int = setting(3, "queries of a search that are run", "code generation.py")
    topk: int = setting(2, "hits per query", "code generation.py")
    pages: int = setting(5, "pages of a call that are read", "ours")
    only_found: bool = setting(True, "read only pages whose address the trajectory's last search gave", "code generation.py")
    say_why: bool = setting(False, "tell the model why a page could not be read; off: it is left out", "code generation.py")
    temperature: float = setting(1.0, "sampling temperature, no top-p", "code train_grpo.sh")
    prompt_tokens: int = setting(320, "longest prompt; longer ones are skipped and counted", "code train_grpo.sh", "tokens")
    turn_tokens: int = setting(64, "longest model turn", "code train_grpo.sh", "tokens")
    observation_tokens: int = setting(192, "longest tool result", "ours", "tokens")
    trajectory_tokens: int = setting(704, "longest trajectory after the prompt", "code train_grpo.sh", "tokens")
    # reward
    reward: Literal["f1", "em"] = setting("f1", "word F1 (sets of words), or exact match; -1 for a broken format", "code format_and_f1.py; paper (reward)")
    score_scope: Literal["model", "response"] = setting(
        "model", "text the format is judged on: what the model wrote; with results too, as the original (tags in results are harmless either way)",
        "code format_and_f1.py", published="response")
    # learning
    mask_observations: bool = setting(True, "leave what the model did not write (results, notices) out of the policy's loss", "code dp_actor.py")
    aggregation: Literal["token", "sequence", "constant"] = setting("token", "mean of the loss over tokens, over sequences, or Dr. GRPO's constant", "code dp_actor.py")
    updates: int = setting(1, "optimiser steps per rollout batch", "code train_grpo.sh")
    lr: float = setting(3e-4, "learning rate of the policy (AdamW)", "code train_grpo.sh")
    warmup_steps: int = setting(3, "linear warm-up of the policy's rate", "ours", "steps")
    weight_decay: float = setting(0.01, "AdamW weight decay", "ours")
    max_grad_norm: float = setting(1.0, "gradient clipping", "ours")
    clip: float = setting(0.2, "clip range of the policy ratio, both sides", "code train_grpo.sh")
    kl: float = setting(0.0, "KL coefficient: k3 in the loss", "code train_grpo.sh")
    entropy: float = setting(0.0, "entropy bonus", "code train_grpo.sh")
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
        model="smollm2", data="", allow="", steps=30, prompts=2, samples=4, max_turns=4, prompt_tokens=640, turn_tokens=96, observation_tokens=320,
        trajectory_tokens=1024, portion_chars=1200, portions=1, pages=1, lr=2e-5, eval_questions=12, eval_every=0, save_every=5, micro_tokens=2048,
        warmup=12),
    "paper": dict(  # 7B instruct; the questions are data/train.parquet of the code's repository
        model="Qwen/Qwen2.5-7B-Instruct", device="cuda", data="train.parquet", search="https://google.serper.dev/search", allow="", cache="web_cache",
        reader="https://dashscope.aliyuncs.com/compatible-mode/v1", reader_model="qwen-plus", date="today", steps=34, prompts=256, max_turns=10,
        topk=10, prompt_tokens=2048, turn_tokens=2000, observation_tokens=8192, trajectory_tokens=30720, lr=1e-6, warmup_steps=0, kl=0.001,
        entropy=0.001, page_s=20.0, reader_tokens=16384, reader_answer_tokens=1024,
        eval_questions=500, eval_every=10, save_every=10, micro_tokens=16384, gradient_checkpointing=True),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# System prompt with the tools' schemas, then the bare question (code scrl/llm_agent/generation.py)
PROMPT = (
    "Today is {date}. You answer questions that need deep research. Search and read pages first, then answer. Write one of two "
    "forms: <think> reasoning </think> with <tool_call> call </tool_call>, or <think> reasoning </think> with <answer> answer "
    "</answer>. The answer is only words, numbers or a phrase; answer yes or no where that is asked.")
TOOLS = [
    {"type": "function", "function": {"name": "web_search", "description": "Search the web", "parameters": {
        "type": "object", "properties": {"query": {"type": "array", "items": {"type": "string"}, "description": "queries"}}, "required": ["query"]}}},
    {"type": "function", "function": {"name": "browse_webpage", "description": "Read web pages", "parameters": {
        "type": "object", "properties": {"url_list": {"type": "array", "items": {"type": "string"}, "description": "addresses"}},
        "required": ["url_list"]}}},
]
THINK = "<think>"


def render(example: Example, tokenizer, system: str = PROMPT.replace("{date}", "2025-01-01"), tools: Sequence[dict] = TOOLS) -> str:
    """The prompt text, with <think> glued on. A chat template that knows nothing of tools gets them as a part of the system prompt."""
    if tokenizer.chat_template is None:
        raise UserError("DeepResearcher talks in messages: it needs an instruct model, whose tokenizer has a chat template")
    apply = lambda text: tokenizer.apply_chat_template([{"role": "system", "content": text}, {"role": "user", "content": example.question.strip()}],
                                                       tools=list(tools), tokenize=False, add_generation_prompt=True)
    text = apply(system)
    if tools[0]["function"]["name"] not in text:
        listed = "\n".join(json.dumps(t) for t in tools)
        text = apply(f"{system}\n\n# Tools\n<tools>\n{listed}\n</tools>\nCall a function with its JSON between <tool_call> and </tool_call>, as "
                     '{"name": "web_search", "arguments": {"query": ["a query"]}}.')
    return with_think(text)


def with_think(text: str) -> str:
    """<think> at the end of what the model goes on from; some templates have put it there."""
    return text if text.rstrip().endswith(THINK) else text + THINK


# ---- Environment ------------------------------------------------------------------------------------------------------
ARGUMENT = {"web_search": "query", "browse_webpage": "url_list"}


def parse_turn(text: str, names: Sequence[str] = tuple(ARGUMENT)) -> tuple[str, str, str | dict]:
    """("answer" | "call" | "", thought, answer or call) of one turn that begins with <think> (code scrl/llm_agent/generation.py). Where an
    answer is opened, a call does not count; whatever is not closed or not a call of these tools is nothing."""
    inside = lambda tag: text.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
    whole = lambda tag: f"<{tag}>" in text and f"</{tag}>" in text
    if "<think>" in text and "<answer>" in text:
        return ("answer", inside("think"), inside("answer")) if whole("think") and whole("answer") else ("", "", "")
    if whole("think") and whole("tool_call"):
        try:
            call = json.loads(inside("tool_call"))
            given = call["arguments"][ARGUMENT[call["name"]]]
            if call["name"] in names and isinstance(given, list) and (given or call["name"] == "web_search"):
                return "call", inside("think"), call
        except (ValueError, KeyError, TypeError, RecursionError):
            return "", "", ""  # malformed: as in the original, the trajectory ends
    return "", "", ""


def environment(turn: Turn, trajectory: Trajectory, names: Sequence[str], wrap: Callable[[str], str]) -> Call | End:
    """One model turn: run its call or end. A call in a turn that was cut at its limit is not run."""
    kind, _, content = parse_turn(THINK + turn.text, names)
    if kind == "call" and turn.reason == "eos":
        return Call(content["name"], json.dumps(content["arguments"][ARGUMENT[content["name"]]]), wrap)
    broken = "<tool_call>" in turn.text or "<answer>" in turn.text
    return End(kind if kind == "answer" else "length" if turn.reason == "length" else "format" if broken else "no_action")


def found(trajectory: Trajectory | None, tool: str, key: str, last: bool = False) -> list[str]:
    """The texts under a key in the results of a tool that the model was shown, in all of them or in the last one."""
    shown = [s.text for s in trajectory.segments if s.author == "tool"] if trajectory else []
    results = [text for call, text in zip(trajectory.calls, shown) if call.name == tool] if trajectory else []
    return [json.loads(m) for text in (results[-1:] if last else results) for m in re.findall(rf'"{key}": ("(?:[^"\\]|\\.)*")', text)]


def show(rows: list[dict]) -> str:
    """A result as the model sees it: JSON, in which no tag can do harm."""
    return neutralise(json.dumps(rows, ensure_ascii=False).encode("utf-8", "replace").decode())


def search_pages(call: ToolCall, search: WebSearch, cfg: Config) -> str | ToolFailure:
    """web_search: titles, addresses and snippets of the first queries."""
    rows, outcome = [], "empty"
    for query in [q for q in json.loads(call.argument) if isinstance(q, str)][:cfg.queries]:
        try:
            hits = [h.passage for h in search.search(query, cfg.topk)]
        except PageFailure as failure:
            hits, outcome = [], failure.outcome if outcome == "empty" else outcome
        outcome = "ok" if hits else outcome
        rows.append({"search_query": query, "web_page_info_list": [{"title": p.title, "url": p.id, "quick_summary": p.text} for p in hits]})
    return show(rows) if outcome == "ok" else ToolFailure(show(rows), outcome)


def browse_pages(call: ToolCall, pages: Fetcher, reader: Reader, cfg: Config) -> str | ToolFailure:
    """browse_webpage: what the reading agent notes in each page. Its memory is what the pages of this trajectory have given so far."""
    known, addresses = found(call.trajectory, "browse_webpage", "page_summary"), found(call.trajectory, "web_search", "url", last=True)
    rows, outcome = [], "empty"
    for url in [u for u in dict.fromkeys(map(str, json.loads(call.argument)))][:cfg.pages]:
        try:
            if cfg.only_found and url not in addresses:
                raise PageFailure("the last search did not find it", "unknown")
            notes = read(reader, call.example.question, pages.fetch(url).text, known, portion_chars=cfg.portion_chars, max_portions=cfg.portions)
        except PageFailure as failure:
            outcome = failure.outcome if outcome == "empty" else outcome
            rows += [{"url": url, "error": str(failure)}] if cfg.say_why else []
            continue
        known, outcome = known + [info for _, info in notes], "ok"
        rows.append({"url": url, "information": [{"page_number": number, "page_summary": info} for number, info in notes]})
    return show(rows) if outcome == "ok" else ToolFailure(show(rows), outcome)


# ---- Reward -----------------------------------------------------------------------------------------------------------
NORMALISE = partial(scoring.normalise_answer, punctuation_as=" ", drop_articles=False)
SCORES = {"f1": partial(scoring.f1, normalise=NORMALISE, as_sets=True, yes_no_rule=False), "em": partial(scoring.exact_match, normalise=NORMALISE)}


def well_formed(text: str) -> bool:
    """As many closing as opening tags of each kind, and one behind every opening one (code format_and_f1.py)."""
    return all(text.count(f"<{tag}>") == text.count(f"</{tag}>") and text.rfind(f"<{tag}>") <= text.rfind(f"</{tag}>") for tag in ("tool_call", "think", "answer"))


def first_answer(text: str) -> str | None:
    pair = re.search(r"<answer>(.*?)</answer>", text, re.S)
    return pair[1] if pair else None


def reward(trajectory: Trajectory, example: Example, cfg: Config) -> dict[str, float]:
    """Named parts of the reward and their total (code format_and_f1.py): -1, or the score of the first answer; the <think> that was glued in
    front of a turn belongs to it. f1 and em are those of the last turn, where a broken format counts 0 (code evaluate/cacluate_metrics.py)."""
    glued = lambda text: THINK if text.rstrip().endswith(THINK) else ""
    before = [trajectory.prompt, *(s.text for s in trajectory.segments)]
    turns = [(glued(b) + s.text).lower() for b, s in zip(before, trajectory.segments) if s.author == "model"]
    text = "".join(turns) if cfg.score_scope == "model" else (glued(trajectory.prompt) + trajectory.response).lower()
    answer, formed = first_answer(text), well_formed(text)
    last = turns[-1] if turns else ""
    said = first_answer(last) if well_formed(last) else None
    parts = {name: score(pred=said, gold=example.answers) if said is not None else 0.0 for name, score in SCORES.items()}
    total = SCORES[cfg.reward](pred=answer, gold=example.answers) if formed and answer is not None else -1.0
    return {**parts, "answered": float(said is not None), "well_formed": float(formed), "total": total}


# ---- Train ------------------------------------------------------------------------------------------------------------
def load_data(cfg: Config) -> tuple[list[Example], list[Example]]:
    """(training questions, held-out questions)."""
    if cfg.data == "tiny":
        return questions("train", 4096, cfg.seed), questions("eval", cfg.eval_questions)
    if not cfg.search:
        raise UserError("questions other than the tiny world's need --search (the address of a server that speaks Serper's protocol)")
    return training_and_held_out(cfg.data, cfg.eval_data, cfg.eval_questions, trains=not cfg.evaluate)


def open_web(cfg: Config, examples: Sequence[Example]) -> tuple[Callable[[Example], WebSearch], Fetcher]:
    """(the search engine for a question, the fetcher of pages). In the tiny world every world has a web of its own, served on loopback."""
    cache = DiskCache(cfg.cache, cfg.cache_days) if cfg.cache else None
    allow, connect_to = [a.strip() for a in cfg.allow.split(",") if a.strip() not in ("", "tiny")], {}
    if cfg.search:
        search = WebSearch(cfg.search, cache)
        search.remote.check()
        engine = lambda example: search
    else:
        web, names = tiny_web([e.meta["world"] for e in examples])
        engines = {world: WebSearch(web.search_url(name), cache) for world, name in names.items()}
        engine, connect_to = lambda example: engines[example.meta["world"]], web.connect_to
        allow += [web.address] if "tiny" in cfg.allow.split(",") else []
    return engine, Fetcher(allow, page_s=cfg.page_s, max_bytes=cfg.page_bytes, connect_to=connect_to, cache=cache)


def day(cfg: Config) -> str:
    """The day that the prompt names; for a run that goes on the one on which it began."""
    settings = folder_of("deep_researcher", cfg.name or f"{cfg.preset}-seed{cfg.seed}") / "config.json"
    if cfg.date == "today" and cfg.resume and settings.exists():
        return json.loads(settings.read_text())["fields"]["date"]["value"]
    return datetime.now(timezone.utc).date().isoformat() if cfg.date == "today" else cfg.date


def train(cfg: Config) -> None:
    cfg = saved_config(Config, cfg.evaluate, cfg) if cfg.evaluate else cfg
    if cfg.plan:
        return print_plan(cfg, response_tokens=cfg.trajectory_tokens, turns=cfg.max_turns + cfg.answer_turn, reference=cfg.kl > 0)
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    scoring.self_test()
    cfg = replace(cfg, date=ranks.broadcast(day(cfg)))  # a setting of the run from here on: --evaluate takes it too
    system = read_template(cfg.template, PROMPT, "{date}").replace("{date}", cfg.date)
    offered = TOOLS if cfg.browse else TOOLS[:1]
    train_set, eval_set = load_data(cfg)
    model, tokenizer = load_model(cfg.model, cfg.dtype, cfg.device, cfg.gradient_checkpointing)
    group, n_prompts = cfg.samples, cfg.prompts
    reference = load_model(cfg.model, cfg.dtype, cfg.device)[0] if cfg.kl else None
    shard(model, reference)  # over the ranks, where there are several
    optimizer = make_optimizer(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    budget = Budget(cfg.prompt_tokens, cfg.turn_tokens, cfg.observation_tokens, cfg.trajectory_tokens, cfg.max_turns - 1 + cfg.answer_turn)
    engine = make_engine(cfg.engine, model, tokenizer, max_slots=max(n_prompts * group, min(cfg.eval_questions, 256)),
                         max_length=cfg.prompt_tokens + cfg.trajectory_tokens)
    engine_for, pages = open_web(cfg, train_set + eval_set)
    reader, policy_reader = open_reader(cfg.reader, model, tokenizer, endpoint_model=cfg.reader_model, max_length=cfg.reader_tokens, max_tokens=cfg.reader_answer_tokens)
    tools = {"web_search": Tool(lambda calls: [search_pages(c, engine_for(c.example), cfg) for c in calls], deadline_s=300),
             "browse_webpage": Tool(lambda calls: [browse_pages(c, pages, reader, cfg) for c in calls], deadline_s=1200)}
    pool, (before, after) = ToolPool(), next_user_turn(tokenizer, engine.eos_ids, role="tool", thought="<think> a </think>\n")
    wrap = lambda text: with_think(before + text + after)
    act = partial(environment, names=[t["function"]["name"] for t in offered], wrap=wrap)
    prompts_of = lambda examples: make_prompts(examples, lambda e: render(e, tokenizer, system, offered), tokenizer, budget)
    eval_prompts, _ = prompts_of(eval_set)

    def sync() -> None:
        engine.sync(model)
        if policy_reader:
            policy_reader.sync(model)

    def answer_eval() -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions, and their reward parts."""
        sync()
        trajectories = rollout(engine, tokenizer, eval_prompts, act, tools, budget, pool, temperature=0.0)
        return ranks.gather(trajectories), ranks.gather([reward(t, t.example, cfg) for t in trajectories])

    if cfg.evaluate:
        return print_evaluation(cfg.evaluate, "f1", cfg, *answer_eval())
    run = Run(cfg, method="deep_researcher", metric="f1", total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)
    trained = {"model": model, "optimizer": optimizer, **({"reference": reference} if reference and cfg.warmup else {})}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.before = run.log_eval(0, *answer_eval(), tokenizer)
        if cfg.warmup:
            shown = {name: as_shown(tool, tokenizer, wrap, cfg.observation_tokens) for name, tool in tools.items()}
            warm_up(cfg, model, tokenizer, train_set, lambda e: render(e, tokenizer, system, offered),
                    lambda e: demonstration(e, shown, tokenizer.eos_token), wrap, run)
            run.log_eval(0, *answer_eval(), tokenizer)
            if reference:  # RL starts here, and stays near here
                reference.load_state_dict(model.state_dict())

    for step in range(first, cfg.steps):
        # 1. sample
        clock = Clock()
        sync()
        prompts, skipped = prompts_of([train_set[i] for i in order(cfg.seed, step, len(train_set), n_prompts)])
        trajectories = rollout(engine, tokenizer, prompts, act, tools, budget, pool, samples=group, temperature=cfg.temperature,
                               seed=cfg.seed, step=step)
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
NAME = re.compile(r"[A-Z][\w'-]+(?: [A-Z][\w'-]+)*")


def turn_of(thought: str, name: str, argument: str) -> str:
    call = {"name": name, "arguments": {ARGUMENT[name]: [argument]}}
    return f" {thought} </think>\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def demonstration(example: Example, tools: dict[str, Tool], end: str) -> list[tuple[str, str]] | None:
    """A trace built by rule: search a name of the question, read its page, and if the answer is not in it do the same with a name from that
    page. (author, text) segments, or None where the rule finds nothing."""
    t = Trajectory(example, 0, 0, "", [])

    def use(thought: str, name: str, argument: str) -> str:
        t.segments.append(Segment("model", turn_of(thought, name, argument) + end, 0, 0))
        t.calls.append(ToolCall(name, json.dumps([argument]), example, trajectory=t))
        text = str(tools[name].run(t.calls[-1:])[0])
        t.segments.append(Segment("tool", text, 0, 0))
        return text

    def look_up(name: str) -> str:
        """The page that bears the name, or else the first one."""
        use(f"I should look up {name}.", "web_search", name)
        hits = dict(zip(found(t, "web_search", "title", last=True), found(t, "web_search", "url", last=True)))
        text = use("I should look up the page.", "browse_webpage", hits.get(name, next(iter(hits.values())))) if hits else ""
        return " ".join(re.findall(r'"page_summary": "((?:[^"\\]|\\.)*)', text)).replace("\\n", " ")  # what was cut has no closing quote

    def answered(page: str) -> list[tuple[str, str]] | None:
        gold = gold_in(example, page)
        return [*((s.author, s.text) for s in t.segments), ("model", f" Now I can answer. </think>\n<answer> {gold} </answer>{end}")] if gold else None

    for name in sorted(NAME.findall(example.question.split(" ", 1)[-1]), key=len, reverse=True)[:2]:
        t.segments, t.calls = [], []
        page = look_up(name)
        if done := answered(page):
            return done
        so_far = t.segments[:], t.calls[:]
        for other in dict.fromkeys(n for n in NAME.findall(page) if n != name):
            t.segments, t.calls = so_far[0][:], so_far[1][:]
            if done := answered(look_up(other)):
                return done
    return None


if __name__ == "__main__":
    main(lambda: train(parse_config(Config, PRESETS)))
