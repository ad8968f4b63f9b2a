"""How each of the ten methods talks: prompt, one text per model turn, one text per observation. Used to build and to measure the
tiny model; a method file keeps its own copy of its contract, and a test holds the two together.

Facts (tags, order, stop strings) follow the papers and their code; the sentences are ours.
"""
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from common.search import Passage, neutralise
from common.tiny.world import Problem, Question, Request, Tool

IM_END, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
NOTICE = ("\nThat was not a valid action. Put a query between <search> and </search>, or the final answer between <answer> and "
          "</answer>. Try again.\n")
NO_OUTPUT = "[no output]"

# every tag is one entry of the vocabulary; they are ordinary text all the same
TAGS = tuple(f"<{slash}{tag}>" for tag in (
    "think search information answer result observation search_query math_exp code interpreter tool_call tool_response tools "
    "response obs user").split() for slash in ("", "/")) + (
    "<|begin_of_query|>", "<|end_of_query|>", "<|begin_of_documents|>", "<|end_of_documents|>", "```python", "```output", "```", "\\boxed{")

PROMPTS = {
    "search_r1": (
        "Answer the question below. Reason between <think> and </think> first, every time you get new information. When you lack "
        "knowledge, call the search engine with <search> query </search>; it returns the best results between <information> and "
        "</information>. You may search as many times as you want. When nothing more is needed, give the answer between <answer> and "
        "</answer>, without explanation. For example, <answer> Beijing </answer>. Question: {question}\n"),
    "otc": (
        "Answer the question below. Reason between <think> and </think> first, every time you get new information. Only when "
        "knowledge is missing, call the search engine with <search> query </search>; it returns the best results between <observation> "
        "and </observation>. Make every call count. When nothing more is needed, give the answer between <answer> and </answer>, "
        "without explanation. For example, <answer> and your answer </answer>. Question: {question}\n"),
    "research": (
        "A dialogue between User and Assistant. The Assistant thinks step by step and may use a Wikipedia search tool. It reasons "
        "between <think> and </think>, searches with <search> query </search>, reads between <result> and </result>, and ends between "
        "<answer> and </answer> with the exact answer in \\boxed{{}}. For example, <think> reasoning </think> <search> query </search> "
        "<result> results </result> <think> reasoning </think> <answer> The answer is \\[ \\boxed{{answer}} \\] </answer>. "
        "User: {question}. Assistant:"),
    "r1_searcher": (
        "The User asks a question and the Assistant solves it: it thinks first and answers afterwards, as <think> reasoning </think> "
        "<answer> answer </answer>. When unsure, it may search while thinking with <|begin_of_query|> keywords <|end_of_query|>, one "
        "fact a query; the results come as <|begin_of_documents|> documents <|end_of_documents|>.\n\nUser:{question}\nAssistant: <think>"),
    "deep_researcher": (
        "Today is {date}. You answer questions that need deep research. Search and read pages first, then answer. Write one of two "
        "forms: <think> reasoning </think> with <tool_call> call </tool_call>, or <think> reasoning </think> with <answer> answer "
        "</answer>. The answer is only words, numbers or a phrase; answer yes or no where that is asked."),
    "swirl": (
        "Answer the question in a few words. You may look things up with <search_query> query </search_query>, one query a message, at "
        "most {budget}; do not repeat one. The result is shown as query -> result. When you are ready, use <answer> answer </answer>. "
        "A message is a query or an answer, never both. Question: {question}"),
    "swirl_math": (
        "Answer the question in a few words. You may compute with <math_exp> expression </math_exp>, one expression a message, at most "
        "{budget}; do not repeat one. The result is shown as query -> result. When you are ready, use <answer> answer </answer>. "
        "A message is an expression or an answer, never both. Question: {question}"),
    "torl": (
        "A dialogue in which the User asks and the Assistant solves the problem.\nUser: Combine reasoning in words with Python programs. "
        "Put the final answer in \\boxed{{}}.\n{question}\nAssistant:\n"),
    "retool": (
        "Solve the problem step by step. You may write Python that a sandbox runs; its output comes between <interpreter> and "
        "</interpreter>. Scripts are complete, with imports. Each snippet is\n<code>\n```python\ncode\n```\n</code>\nThe last part of the "
        "response is\n<answer>\n\\boxed{{the answer}}\n</answer>\n*user question:*\nSolve this problem and put the answer in \\boxed{{}}. "
        "{question}\nRemember to end with the answer in its tags."),
    "toolrl": (
        "You are a multi-turn dialogue assistant. You may call tools and you give structured replies.\n\n**Available Tools**\n{tools}\n\n"
        "**Steps for Each Turn**\n1. Think about the context.\n2. Decide on tool usage.\n3. Respond.\n\n**Output Format**\n```plaintext\n"
        "<think> thoughts </think>\n<tool_call>\n{{\"name\": \"tool name\", \"parameters\": {{\"parameter\": \"value\"}}}}\n</tool_call>\n"
        "<response> reply </response>\n```\n\n**Notes**\n1. Always think. Then call tools, or respond, or both.\n2. Several calls go into "
        "one block, one JSON object a line, each with name and parameters ({{}} if there are none).\n3. Look at the history."),
    "tool_n1": (
        "You are an expert in composing functions. Make one or more function calls for the request; if none fits, or parameters are "
        "missing, make no call.\n# Tool\n<tools>\n{tools}\n</tools>\nReason between <think> and </think>. Then give the calls as a JSON "
        "list between <tool_call> and </tool_call>; the empty list for no call. Do both in one reply. For example:\n<think> I need two "
        "calls. </think>\n<tool_call>\n[{{\"name\": \"f\", \"arguments\": {{\"x\": 1}}}}, {{\"name\": \"g\", \"arguments\": {{\"y\": "
        "\"b\"}}}}]\n</tool_call>\nMind the types of the arguments."),
}
RESEARCH_TOOLS = [
    {"type": "function", "function": {"name": "web_search", "description": "Search the web", "parameters": {
        "type": "object", "properties": {"query": {"type": "array", "items": {"type": "string"}, "description": "queries"}}, "required": ["query"]}}},
    {"type": "function", "function": {"name": "browse_webpage", "description": "Read web pages", "parameters": {
        "type": "object", "properties": {"url_list": {"type": "array", "items": {"type": "string"}, "description": "addresses"}},
        "required": ["url_list"]}}},
]


def chat(*messages: tuple[str, str], tools: list[dict] | None = None) -> str:
    """The same text as the tokenizer's chat template, with the assistant's turn open."""
    out = ""
    for i, (role, content) in enumerate(messages):
        if i == 0 and tools:
            listed = "\n".join(json.dumps(t) for t in tools)
            content = f"{content}\n\n# Tools\n<tools>\n{listed}\n</tools>\nCall a function with its JSON between <tool_call> and </tool_call>."
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        out += f"<|im_start|>{role}\n{content}{IM_END}\n"
    return out + "<|im_start|>assistant\n"


def render_docs(hits: list[Passage]) -> str:
    return "\n".join(f"Doc {i}(Title: {p.title}) {neutralise(p.text)}" for i, p in enumerate(hits, 1))


def next_user_turn(content: str) -> str:
    return f"\n<|im_start|>user\n{content}{IM_END}\n<|im_start|>assistant\n"


def toolrl_tools(tools: tuple[Tool, ...]) -> str:
    return "\n".join(f"{i}. Name: {t.name}\nDescription: {t.description}\nParameters: "
                     + json.dumps({p: {"description": text, "type": kind, "default": ""} for p, (kind, text) in t.parameters.items()})
                     for i, t in enumerate(tools, 1))


def json_tools(tools: tuple[Tool, ...]) -> str:
    return "\n".join(json.dumps({"type": "function", "function": {"name": t.name, "description": t.description, "parameters": {
        p: {"type": kind, "description": text} for p, (kind, text) in t.parameters.items()}}}) for t in tools)


@dataclass(frozen=True)
class Protocol:
    """One way of talking. Texts of a turn end with the stop string, or with the end token where the turn ends a message."""
    name: str
    family: str  # search | math | tools: which tasks it is tried on
    prompt: Callable  # task -> text up to the first sampled token
    call: Callable  # thought, argument -> the text of a turn that calls the tool
    answer: Callable  # thought, value -> the text of the last turn
    observe: Callable  # argument, result -> the text that follows the call (result: passages, or a string)
    stops: tuple[str, ...]
    calls: str  # pattern of a call, group 1 the argument
    answers: str  # pattern of an answer, group 1 the value
    end: str = IM_END
    lead: str = ""  # what a turn after an observation starts with

    def parse(self, turn: str) -> tuple[str, str] | None:
        """("call", argument), ("answer", value) or None: whichever stands first in the turn."""
        found = [(m.start(), kind, m[1].strip()) for kind, pattern in (("call", self.calls), ("answer", self.answers))
                 if (m := re.search(pattern, turn, re.S))]
        return min(found)[1:] if found else None


def _thought(t: str) -> str:
    return f"<think> {t} </think>"


def _searching(name: str, tag: str) -> Protocol:
    return Protocol(
        name, "search",
        prompt=lambda q: chat(("user", PROMPTS[name].format(question=q.text))),
        call=lambda t, x: f"{_thought(t)}\n<search> {x} </search>",
        answer=lambda t, x: f"{_thought(t)}\n<answer> {x} </answer>{IM_END}",
        observe=lambda x, hits: f"\n\n<{tag}>{render_docs(hits)}</{tag}>\n\n",
        stops=("</search>", "</answer>"), calls=r"<search>(.*?)</search>", answers=r"<answer>(.*?)</answer>")


def web_call(x: str) -> str:
    name, key = ("browse_webpage", "url_list") if x.startswith("http") else ("web_search", "query")
    return json.dumps({"name": name, "arguments": {key: [x]}})


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _boxed(pattern: str = "") -> str:
    return r"\\boxed\{([^{}]*)\}" + pattern


PROTOCOLS = {p.name: p for p in (
    _searching("search_r1", "information"),
    _searching("otc", "observation"),
    Protocol(
        "research", "search",
        prompt=lambda q: PROMPTS["research"].format(question=q.text),
        call=lambda t, x: f"{_thought(t)}\n<search> {x} </search>",
        answer=lambda t, x: f"{_thought(t)}\n<answer> The answer is \\[ \\boxed{{ {x} }} \\] </answer>{END_OF_TEXT}",
        observe=lambda x, hits: " <result>\n" + "\n\n".join(f"{p.title}\n{neutralise(p.text)}" for p in hits) + "\n</result>",
        stops=("</search>",), calls=r"<search>(.*?)</search>", answers=_boxed(), end=END_OF_TEXT, lead="\n"),
    Protocol(
        "r1_searcher", "search",
        prompt=lambda q: PROMPTS["r1_searcher"].format(question=q.text),
        call=lambda t, x: f" {t}\n<|begin_of_query|> {x} <|end_of_query|>",
        answer=lambda t, x: f" {t} </think>\n<answer> {x} </answer>{END_OF_TEXT}",
        observe=lambda x, hits: "\n\n<|begin_of_documents|>\n" + "".join(
            f"({i}){p.title} {neutralise(p.text)}\n" for i, p in enumerate(hits, 1)) + "<|end_of_documents|>\n\n",
        stops=("<|end_of_query|>",), calls=r"<\|begin_of_query\|>(.*?)<\|end_of_query\|>", answers=r"<answer>(.*?)</answer>",
        end=END_OF_TEXT),
    Protocol(
        "deep_researcher", "search",
        prompt=lambda q: chat(("system", PROMPTS["deep_researcher"].format(date="2025-01-01")), ("user", q.text),
                              tools=RESEARCH_TOOLS) + "<think>",
        call=lambda t, x: f" {t} </think>\n<tool_call>\n{web_call(x)}\n</tool_call>{IM_END}",
        answer=lambda t, x: f" {t} </think>\n<answer> {x} </answer>{IM_END}",
        observe=lambda x, result: f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response>{IM_END}\n<|im_start|>assistant\n<think>",
        stops=(), calls=r"<tool_call>\s*\{.*?\[\"(.*?)\"\].*?</tool_call>", answers=r"<answer>(.*?)</answer>"),
    Protocol(
        "swirl", "search",
        prompt=lambda q: chat(("user", PROMPTS["swirl"].format(budget=5, question=q.text))),
        call=lambda t, x: f"{t} <search_query> {x} </search_query>{IM_END}",
        answer=lambda t, x: f"{t} <answer> {x} </answer>{IM_END}",
        observe=lambda x, hits: next_user_turn(f"{x} -> {neutralise(hits[0].text) if hits else 'nothing found'}"),
        stops=(), calls=r"<search_query>(.*?)</search_query>", answers=r"<answer>(.*?)</answer>"),
    Protocol(
        "swirl_math", "math",
        prompt=lambda q: chat(("user", PROMPTS["swirl_math"].format(budget=10, question=q.text))),
        call=lambda t, x: f"{t} <math_exp> {x} </math_exp>{IM_END}",
        answer=lambda t, x: f"{t} <answer> {x} </answer>{IM_END}",
        observe=lambda x, result: next_user_turn(f"{x} -> {result}"),
        stops=(), calls=r"<math_exp>(.*?)</math_exp>", answers=r"<answer>(.*?)</answer>"),
    Protocol(
        "torl", "math",
        prompt=lambda q: PROMPTS["torl"].format(question=q.text),
        call=lambda t, x: f"{t}\n{_fence(x)}\n```output",
        answer=lambda t, x: f"{t} The answer is \\boxed{{{x}}}.{END_OF_TEXT}",
        observe=lambda x, result: f"\n{result or NO_OUTPUT}\n```\n",
        stops=("```output",), calls=r"```python\n(.*?)\n```\n```output", answers=_boxed(), end=END_OF_TEXT),
    Protocol(
        "retool", "math",
        prompt=lambda q: chat(("user", PROMPTS["retool"].format(question=q.text))),
        call=lambda t, x: f"{t}\n<code>\n{_fence(x)}\n</code>",
        answer=lambda t, x: f"{t}\n<answer>\n\\boxed{{{x}}}\n</answer>{IM_END}",
        observe=lambda x, result: f"\n<interpreter>\n{result or NO_OUTPUT}</interpreter>\n\n",
        stops=("</code>",), calls=r"<code>\n```python\n(.*?)\n```\n</code>", answers=r"<answer>\s*" + _boxed(r"\s*</answer>")),
    Protocol(
        "toolrl", "tools",
        prompt=lambda r: chat(("system", PROMPTS["toolrl"].format(tools=toolrl_tools(r.tools))),
                              ("user", f"**Dialogue Record History**\n<user> {r.text} </user>")),
        call=lambda t, x: "", observe=lambda x, result: "",
        answer=lambda t, calls: f"{_thought(t)}\n" + ("<tool_call>\n" + "\n".join(
            json.dumps({"name": n, "parameters": a}) for n, a in calls) + "\n</tool_call>" if calls
            else "<response> I have no tool for that. </response>") + IM_END,
        stops=(), calls=r"$^", answers=r"(<(?:tool_call|response)>.*)"),
    Protocol(
        "tool_n1", "tools",
        prompt=lambda r: chat(("system", PROMPTS["tool_n1"].format(tools=json_tools(r.tools))), ("user", r.text)),
        call=lambda t, x: "", observe=lambda x, result: "",
        answer=lambda t, calls: f"{_thought(t)}\n<tool_call>\n{json.dumps([{'name': n, 'arguments': a} for n, a in calls])}\n</tool_call>{IM_END}",
        stops=(), calls=r"$^", answers=r"(<tool_call>.*)"),
)}


def parse_calls(protocol: Protocol, text: str) -> list | None:
    """The (name, arguments) of a function-calling turn; None when it cannot be read or has no thought."""
    if "<think>" not in text or "</think>" not in text:
        return None
    if protocol.name == "toolrl" and "<response>" in text and "<tool_call>" not in text:
        return []
    block = re.search(r"<tool_call>(.*?)</tool_call>", text, re.S)
    try:
        rows = [json.loads(line) for line in block[1].strip().split("\n")] if block else None
        rows = rows[0] if rows and protocol.name == "tool_n1" else rows
        return None if rows is None else [(c["name"], c["parameters" if protocol.name == "toolrl" else "arguments"]) for c in rows]
    except (json.JSONDecodeError, KeyError, TypeError):
        return None


def succeeded(protocol: Protocol, task: Question | Problem | Request, turn: str) -> bool:
    """Whether a last turn ends the task as it should: the exact answer in the right place, or the exact calls."""
    if protocol.family == "tools":
        calls = parse_calls(protocol, turn)
        key = lambda rows: sorted(json.dumps(row, sort_keys=True) for row in rows)
        return calls is not None and key(calls) == key(task.calls)
    found = protocol.parse(turn)
    return bool(found) and found[0] == "answer" and found[1].strip() == task.answer
