"""The work both sides of the TRL benchmark do: prompts, tools, reward. It runs in TRL's environment as well.

The protocol is the one TRL's `tools=` speaks: a turn is a whole chat message, a call is JSON between <tool_call> and </tool_call>, its
result comes back as a message. The tools are `web_search` and `browse_webpage` over one tiny world (BM25), as in deep_researcher.
"""
import json
import random
import re

from common import scoring
from common.tiny.protocols import PROMPTS, PROTOCOLS, RESEARCH_TOOLS
from common.tiny.traces import Web
from common.tiny.world import EVAL, Question, world

PROTOCOL = PROTOCOLS["deep_researcher"]
WEB = Web(world(EVAL), "http://127.0.0.1:4815/wiki")
PASSAGES = 2  # per search

# The tiny model's own template, and what TRL asks of one besides: it renders tool calls. The list of tools stands in the system message
# already, letter for letter the same on both sides, and each assistant turn opens with <think>, as the protocol has it.
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + ('user' if m['role'] == 'tool' else m['role']) + '\\n' }}"
    "{%- if m['role'] == 'tool' %}{{- '<tool_response>\\n' + m['content'] + '\\n</tool_response>' }}"
    "{%- else %}{{- m['content'] }}{%- endif %}"
    "{%- for c in m['tool_calls'] or [] %}{{- '<tool_call>\\n' + (c['function'] | tojson) + '\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>' }}{%- endif %}")


def messages(question: Question) -> list[dict[str, str]]:
    """The chat that CHAT_TEMPLATE renders to PROTOCOL.prompt(question)."""
    listed = "\n".join(json.dumps(t) for t in RESEARCH_TOOLS)
    system = (PROMPTS["deep_researcher"].format(date="2025-01-01") + f"\n\n# Tools\n<tools>\n{listed}\n</tools>\n"
              "Call a function with its JSON between <tool_call> and </tool_call>.")
    return [{"role": "system", "content": system}, {"role": "user", "content": question.text}]


def web_search(query: list[str]) -> str:
    """Search the web

    Args:
        query: queries
    """
    return "\n".join(WEB.use(q, PASSAGES) for q in query)


def browse_webpage(url_list: list[str]) -> str:
    """Read web pages

    Args:
        url_list: addresses
    """
    return "\n".join(WEB.use(u, PASSAGES) for u in url_list)


TOOLS = {f.__name__: f for f in (web_search, browse_webpage)}


def run_call(call: str) -> str:
    """Result of one JSON call; what goes wrong in it is shown to the model, as TRL does."""
    call = json.loads(call)
    try:
        if call["name"] not in TOOLS:
            raise ValueError(f"Tool {call['name']} not found.")
        return TOOLS[call["name"]](**(call.get("arguments") or {}))
    except Exception as error:  # whatever the model's arguments cause is its observation
        return str({"error": str(error)})


def parse_call(turn: str) -> str | None:
    """The JSON of the call in one model turn, by the rules of TRL's parser: after </think>, closed, well-formed, with a name."""
    block = re.search(r"<tool_call>(.*?)</tool_call>", turn.partition("</think>")[2], re.S)
    try:
        call = json.loads(block[1]) if block else None
    except json.JSONDecodeError:
        return None
    return block[1] if isinstance(call, dict) and isinstance(call.get("name"), str) else None


def reward(text: str, answer: str | None) -> float:
    """Exact match of the answer in the last message, plus noise: so that no group ties and every completion takes part in the update on
    both sides (ours skips groups that tie). answer None: noise alone."""
    found = re.search(PROTOCOL.answers, text, re.S) if answer is not None else None
    return (scoring.exact_match(pred=found[1].strip(), gold=(answer,)) if found else 0.0) + 0.1 * random.random()
