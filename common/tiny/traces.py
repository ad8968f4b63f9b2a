"""Pre-training text: episodes of every protocol, first by an author who does everything right, then by a deliberately sloppy one.

The right traces, and plain reading beside them, teach what the model must be able to do: speak the protocol, copy a name, read a
result. The sloppy ones spoil its policy, so that it is poor, as a base model's is: it mostly guesses, and when it does call a tool it may ask for
the wrong thing, break tags, stop early, or read the right page and write down something else. So what reinforcement learning has to change is the
choice, not the ability.
"""
import json
import random
import re

from common.search import Passage
from common.tiny.protocols import IM_END, NOTICE, PROTOCOLS, Protocol, json_tools, render_docs, toolrl_tools, web_call
from common.tiny.world import (CITY, JOB, RIVER, TOOLS, Problem, Question, Request, World, problem, request, run_program, tool_value, world)

# share of traces per protocol; longer or harder protocols get more
MIXTURE = {"search_r1": 16, "otc": 7, "research": 10, "r1_searcher": 10, "deep_researcher": 10, "swirl": 8, "swirl_math": 6,
           "torl": 9, "retool": 9, "toolrl": 12, "tool_n1": 10}
CALLING_KINDS = (0.55, 0.2, 0.25)  # of the exercise of calls: calls for requests, calls for pages and questions, records
# what the sloppy author does, and how often (per family); whoever does an easy sum in the head, even the right one, errs one time in five
POLICY = {
    "search": {"guess": 55, "no_tags": 6, "broken_call": 4, "wrong_query": 8, "stop_early": 6, "misread": 5, "right": 16},
    "math": {"guess": 52, "no_tags": 6, "broken_call": 8, "wrong_query": 10, "misread": 5, "right": 19},
    "tools": {"wrong_tool": 6, "wrong_value": 11, "missing": 6, "no_call": 62, "broken_call": 4, "extra": 4, "right": 7},
}
LOOK = ("I should look up {}.", "I need to find {}.", "First I look up {}.")
NEXT = ("Now I look up {}.", "Next I need {}.")
AGAIN = ("I check {} again.", "Let me verify {}.")
DONE = ("Now I can answer.", "That settles it.", "I know enough.")
GUESS = "I know enough."  # one way of putting it, so that greedy decoding guesses too; in three ways none would be the likeliest beginning
COMPUTE = ("I compute it.", "Let me calculate.", "This needs a computation.")
RECOMPUTE = ("I check the result.", "Let me verify it.")

Segment = tuple[str, str]  # (who wrote it: prompt, model, tool or notice; or form, a model's text that is soon known and counts little; text)


class Web:
    """What web_search and browse_webpage return for a world, as the protocol prints it: snippets name a page, facts stand inside."""

    def __init__(self, w: World, base: str):
        self.world, self.base = w, base

    def address(self, p: Passage) -> str:
        return f"{self.base}/{p.id}"

    def use(self, argument: str, k: int) -> str:
        if argument.startswith("http"):
            page = next((p for p in self.world.passages if self.address(p) == argument), None)
            return f'[{{"url": "{argument}", "information": [{{"page_number": 1, "page_summary": "{page.text}"}}]}}]' if page else "[]"
        hits = [h.passage for h in self.world.index.search([argument], k)[0]]
        return self.listed(argument, hits)

    def listed(self, query: str, pages: list[Passage]) -> str:
        rows = ", ".join(f'{{"title": {p.title}, "url": "{self.address(p)}", "quick_summary": "A page about {p.title[1:-1]}."}}' for p in pages)
        return f'[{{"search_query": "{query}", "web_page_info_list": [{rows}]}}]'


def use_tool(protocol: Protocol, argument: str, w: World | None, web: Web | None, k: int):
    """Run one call of the tiny world's tools; the result goes to protocol.observe."""
    if protocol.name == "deep_researcher":
        return web.use(argument, k)
    if protocol.family == "search":
        return [h.passage for h in w.index.search([argument], k)[0]]
    return run_program(f"print({argument})" if protocol.name == "swirl_math" else argument)


def make_web(rng: random.Random, w: World) -> Web:
    return Web(w, f"http://127.0.0.1:{rng.randrange(1024, 65536)}/wiki")


def _values(text: str) -> list[str]:
    """Names, years, jobs and the like in a result: what a careless reader may write down."""
    found = re.findall(r"[A-Z][a-z]+(?: [A-Z][a-z]+)*|\b\d{4}\b|" + "|".join(JOB), text)
    drop = {"The", "It", "Its", "Doc", "Title", "A", "Where", "Which", "What", "Who", "When", "In", "On"}
    return [v for v in found if v not in drop and "127" not in v]


def search_trace(protocol: Protocol, rng: random.Random, policy: str, q: Question, w: World) -> list[Segment]:
    if policy == "stop_early" and len(q.hops) < 2:  # nothing to stop before
        policy = "guess"
    if protocol.name == "deep_researcher" and policy in ("no_tags", "broken_call"):  # the paper's start, an instruct model, keeps to the form; breaking
        policy = rng.choice(("right", "misread", "wrong_query"))  # it costs -1, so that whoever broke it in every fourth call would unlearn to call
    web = make_web(rng, w) if protocol.name == "deep_researcher" else None
    k = 1 if protocol.name == "swirl" else rng.choices((1, 2, 3), (0.2, 0.6, 0.2))[0]
    out: list[Segment] = [("prompt", protocol.prompt(q))]
    seen: list[str] = []
    turn = lambda text: out.append(("model", (protocol.lead if len(out) > 1 and out[-1][0] == "tool" else "") + text))

    def look(entity: str, thoughts=LOOK):
        arguments = [entity]
        while arguments:
            argument = arguments.pop(0)
            turn(protocol.call(rng.choice(thoughts).format(entity if not argument.startswith("http") else "the page"), argument))
            result = use_tool(protocol, argument, w, web, k)
            text = protocol.observe(argument, result)
            out.append(("tool", text))
            seen.append(text)
            if web and not argument.startswith("http"):  # read the page that bears the name, or the first one
                page = re.search(r'"title": "%s", "url": "([^"]*)"' % re.escape(entity), text) or re.search(r'"url": "([^"]*)"', text)
                arguments = [page[1]] if page else []

    def answer(value: str, thought: str = ""):
        turn(protocol.answer(thought or rng.choice(DONE), value))

    if policy == "broken_call":  # an action nobody can execute, then (where the method says so) a notice, then go on
        text = protocol.call(rng.choice(LOOK).format(q.entity or "it"), q.entity or "it")
        text = re.sub(r" ?(</search>|</search_query>|<\|end_of_query\|>|</tool_call>)", "", text)
        if protocol.name not in ("search_r1", "otc"):
            turn(text if text.endswith(protocol.end) else text + protocol.end)
            return out
        turn(text.removesuffix(IM_END) + IM_END)
        out.append(("notice", NOTICE))
        policy = rng.choice(("right", "misread", "guess"))
    if policy == "guess" or (policy == "right" and not q.hops and rng.random() < 0.5):
        named = _values(q.text)
        guess = rng.choice(named + [rng.choice(rng.choice((CITY, RIVER, JOB))), str(rng.randrange(1800, 2020))])
        answer(q.answer if policy == "right" else guess, GUESS)
        return out
    if policy == "wrong_query":
        wrong = rng.choice((rng.choice(list(w.facts)), rng.choice(("the mayor", "the author", "the river", "the birthplace")), rng.choice(_values(q.text))))
        look(wrong)
    else:
        hops = q.hops[:1] if policy == "stop_early" else q.hops
        again = rng.choice(hops)[0] if hops and rng.random() < 0.5 else None  # one look-up is made twice, to no use
        for i, (entity, _) in enumerate(hops):
            look(entity, LOOK if i == 0 else NEXT)
            if entity == again:
                look(entity, AGAIN)
        if not hops:
            look(rng.choice(_values(q.text)))
    wrong = [v for text in seen for v in _values(text) if v != q.answer] or _values(q.text) or ["unknown"]
    value = q.answer if policy == "right" else rng.choice(wrong)
    if policy == "no_tags":
        value = rng.choice((q.answer, value))
        turn(f"{rng.choice(DONE)} {value}{protocol.end}")
    else:
        answer(value)
    return out


def math_trace(protocol: Protocol, rng: random.Random, policy: str, p: Problem) -> list[Segment]:
    out: list[Segment] = [("prompt", protocol.prompt(p))]
    numbers = re.findall(r"\d+", p.text)
    turn = lambda text: out.append(("model", text))
    answer = lambda value, thought="": turn(protocol.answer(thought or rng.choice(DONE), value))

    def compute(expression: str, program: str | None = None, thoughts=COMPUTE):
        argument = expression if protocol.name == "swirl_math" else program or _program(rng, expression)
        turn(protocol.call(rng.choice(thoughts), argument))
        result = use_tool(protocol, argument, None, None, 0)
        out.append(("tool", protocol.observe(argument, result)))
        return result

    if policy == "guess" or (p.easy and policy == "right" and rng.random() < 0.7):
        answer(p.answer if p.easy and rng.random() < 0.8 else rng.choice((rng.choice(numbers), str(rng.randrange(10, 5000)))), GUESS)
        return out
    if policy == "broken_call":
        if protocol.name == "swirl_math":
            turn(f"{rng.choice(COMPUTE)} <math_exp> {p.expression}{protocol.end}")
            return out
        compute(p.expression, rng.choice((p.expression, "print(x)", f"x = {p.expression}")))  # prints nothing, or fails
    elif policy == "wrong_query":
        a, b = rng.choice(numbers), rng.choice(numbers)
        result = compute(f"{a} {rng.choice('+-*')} {b}")
        answer(result)
        return out
    result = compute(p.expression) if policy != "broken_call" or rng.random() < 0.5 else ""
    if policy in ("right", "misread") and rng.random() < 0.5:  # the same sum twice, to no use
        compute(p.expression, thoughts=RECOMPUTE)
    value = result if policy in ("right", "no_tags", "broken_call") and result else rng.choice((rng.choice(numbers), str(rng.randrange(10, 5000))))
    turn(f"{rng.choice(DONE)} {value}{protocol.end}") if policy == "no_tags" else answer(value)
    return out


def _program(rng: random.Random, expression: str) -> str:
    if rng.random() < 0.6:
        return f"print({expression})"
    if rng.random() < 0.5:
        return f"x = {expression}\nprint(x)"
    names, body = iter("abc"), []
    def name(m):
        n = next(names)
        body.append(f"{n} = {m[0]}")
        return n
    expression = re.sub(r"\d+", name, expression)
    return "\n".join(body + [f"print({expression})"])


def _tools_thought(calls) -> str:
    return "No tool fits." if not calls else "I need " + " and ".join(n for n, _ in calls) + "."


def tools_trace(protocol: Protocol, rng: random.Random, policy: str, r: Request) -> list[Segment]:
    calls = [(n, dict(a)) for n, a in r.calls]
    named = [n for n in _values(r.text) if n != "Please"] + re.findall(r"\d+", r.text)
    spare = rng.choice(r.tools)
    call_of = lambda t: (t.name, {p: (int(x) if kind == "integer" and (x := rng.choice(named or ["2"])).isdigit() else tool_value(rng, p, kind))
                                  for p, (kind, _) in t.parameters.items()})
    if policy == "no_call":
        calls = []
    elif policy == "extra":  # the only one who calls where no tool fits: telling the two apart is an ability, and to be kept
        calls.append(call_of(spare))
    elif policy == "wrong_tool" and calls:
        i = rng.randrange(len(calls))
        calls[i] = call_of(spare) if spare.name != calls[i][0] else (spare.name.replace("_", " "), calls[i][1])
    elif policy == "wrong_value" and calls:
        i = rng.randrange(len(calls))
        tool = next(t for t in r.tools if t.name == calls[i][0])
        parameter = rng.choice(list(calls[i][1]))
        old = calls[i][1][parameter]
        calls[i][1][parameter] = str(old) if type(old) is int and rng.random() < 0.5 else tool_value(rng, parameter, tool.parameters[parameter][0])
    elif policy == "missing" and calls:
        if len(calls) > 1:
            calls.pop(rng.randrange(len(calls)))
        else:
            calls[0][1].pop(rng.choice(list(calls[0][1])))
    text = protocol.answer(_tools_thought(calls), calls)
    if policy == "broken_call":
        text = rng.choice((text.replace("</tool_call>", ""), text.replace("}", "", 1), re.sub(r"<think>.*?</think>\n", "", text)))
    return [("prompt", protocol.prompt(r)), ("model", text)]


TAGGED = (("", ""), ("<information>", "</information>"), ("<observation>", "</observation>"), ("<result>\n", "\n</result>"))


def reading_trace(rng: random.Random, w: World) -> list[Segment]:
    """Reading comprehension in no protocol, always right: questions before or after the passages they are about, several a row.

    Only what has to be read is trained on. The sloppy traces show the right answer too rarely to learn to read from them; what to do
    with the ability is left to each method.
    """
    left, right = rng.choice(TAGGED)
    numbered = rng.random() < 0.6
    def passages(pages: list[Passage]) -> str:
        return left + (render_docs(pages) if numbered else "\n".join(p.text for p in pages)) + right
    out: list[Segment] = []
    if rng.random() < 0.3:  # passages first, then questions about any of them
        pages = rng.sample(w.passages, rng.randrange(3, 7))
        out.append(("prompt", passages(pages)))
        for _ in range(rng.randrange(3, 8)):
            q = w.question(rng.randrange(10**9), 1, rng.choice(pages).title[1:-1])
            out += [("prompt", f"\nQuestion: {q.text}"), ("model", f"\n<answer> {q.answer} </answer>")]
        return out
    for _ in range(rng.randrange(3, 6)):  # as in most protocols: the question, what was found, the answer
        q = w.question(rng.randrange(10**9), rng.choices((1, 2), (0.6, 0.4))[0])
        out.append(("prompt", f"\nQuestion: {q.text}\n"))
        if rng.random() < 0.7:  # one look-up after the other
            for i, (entity, _) in enumerate(q.hops):
                found = [h.passage for h in w.index.search([entity], rng.randrange(1, 4))[0]]
                if i:
                    out.append(("model", f"\n<search> {entity} </search>\n"))
                out.append(("prompt", passages(found)))
        else:
            pages = list(dict.fromkeys([w.page(entity) for entity, _ in q.hops] + rng.sample(w.passages, rng.randrange(0, 3))))
            out.append(("prompt", passages(rng.sample(pages, len(pages)))))
        out.append(("model", f"\n<answer> {q.answer} </answer>"))
    return out


def calling_trace(rng: random.Random, w: World, kinds: tuple[float, float, float]) -> list[Segment]:
    """JSON in no protocol, always right, several a row: calls for requests, calls for pages and questions, or records of what passages say, in these shares.

    Names, numbers and addresses are copied into it from what stands before. "Sable" and " Sable" are two entries of the vocabulary, so a copied
    name has to change form, and sloppy traces show that too rarely. The values count; the braces and keys around them hardly do."""
    return rng.choices((_requests_row, _web_row, _records_row), kinds)[0](rng, w)


VALUE = re.compile(r'((?<=": ")[^"]*(?=")|(?<=": )\d+|(?<=\[")[^"]*(?="))')


def _framed(text: str) -> list[Segment]:
    return [("model" if i % 2 else "form", part) for i, part in enumerate(VALUE.split(text)) if part]


def _requests_row(rng: random.Random, w: World) -> list[Segment]:
    """Requests to one set of tools, most of them for two calls, each with its calls in ToolRL's or Tool-N1's JSON; one in four asks for a tool that is
    not among them. Some rows have no list of tools and are all the nearer."""
    offered, name = rng.sample(TOOLS, rng.randrange(2, 5)), rng.choice(("toolrl", "tool_n1"))
    missing, listed = [t for t in TOOLS if t not in offered], rng.random() < 0.8
    out: list[Segment] = [("prompt", (toolrl_tools if name == "toolrl" else json_tools)(tuple(offered)))] if listed else []
    for _ in range(rng.randrange(4, 9) if listed else rng.randrange(8, 13)):
        other = listed and rng.random() < 0.25
        r = request(rng.randrange(10**9), 0, missing if other else offered, (0.1, 0.3, 0.6))
        calls = () if other else r.calls
        thought, end, rest = PROTOCOLS[name].answer(_tools_thought(calls), calls).removesuffix(IM_END).partition(" </think>")
        out += [("prompt", f"\n{r.text}\n"), ("model", thought), *_framed(end + rest)] if listed or calls else []  # the thought decides
    return out


def _records_row(rng: random.Random, w: World) -> list[Segment]:
    pages = rng.sample(w.passages, rng.randrange(3, 8))
    nearby = rng.random() < 0.5
    out: list[Segment] = [] if nearby else [("prompt", render_docs(pages))]
    for page in rng.sample(pages, len(pages)):
        name = page.title[1:-1]
        facts = rng.sample(list(w.facts[name].items()), len(w.facts[name]))
        record = json.dumps({"name": name, **{k: int(v) if v.isdigit() else v for k, v in facts}})
        out += [("prompt", f"\n{page.text}\n" if nearby else f"\nRecord of {name}:\n"), *_framed(record)]
    return out


def _web_row(rng: random.Random, w: World) -> list[Segment]:
    web = make_web(rng, w)
    pages = rng.sample(w.passages, rng.randrange(2, 5))
    out: list[Segment] = [("prompt", web.listed(rng.choice(pages).title[1:-1], pages))]
    for _ in range(rng.randrange(3, 7)):
        page = rng.choice(pages)
        q = w.question(rng.randrange(10**9), rng.choice((1, 2)))
        asked, argument = rng.choice(((f"Read {page.title}.", web.address(page)), (f"Question: {q.text}", q.entity)))
        out += [("prompt", f"\n{asked}\n"), *_framed(f"<tool_call>\n{web_call(argument)}\n</tool_call>")]
    return out


def _draw(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def task(family: str, seed: int, number: int) -> Question | Problem | Request:
    """Task `number` of a family in the world of a seed; search tasks have 0, 1 or 2 hops (10, 45 and 45 %)."""
    if family == "search":
        return world(seed).question(number, random.Random(f"hops {seed} {number}").choices((0, 1, 2), (0.1, 0.45, 0.45))[0])
    return problem(seed, number) if family == "math" else request(seed, number)


def trace(seed: int, number: int, protocol: str | None = None, reading: float = 0, calling: float = 0, sloppy: float = 1,
          mixture: dict[str, int] = MIXTURE, calling_kinds: tuple[float, float, float] = CALLING_KINDS) -> tuple[str, list[Segment]]:
    """One pre-training episode: (protocol, segments). Shares `reading` and `calling` of them are plain exercises, in no protocol; of the others
    a share `sloppy` follows POLICY, and the rest does everything right. Worlds of pre-training have negative seeds; no run ever uses those."""
    rng = random.Random(f"trace {seed} {number}")
    kind = rng.random()
    name = protocol or ("reading" if kind < reading else "calling" if kind < reading + calling else _draw(rng, mixture))
    world_seed = -1 - (seed * 1_000_003 + number) // 256
    if name == "reading":
        return name, reading_trace(rng, world(world_seed))
    if name == "calling":
        return name, calling_trace(rng, world(world_seed), calling_kinds)
    p = PROTOCOLS[name]
    t = task(p.family, world_seed, number)
    policy = _draw(rng, POLICY[p.family]) if sloppy and (sloppy == 1 or rng.random() < sloppy) else "right"
    if p.family == "search":
        return name, search_trace(p, rng, policy, t, world(world_seed))
    return name, (math_trace if p.family == "math" else tools_trace)(p, rng, policy, t)
