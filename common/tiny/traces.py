"""Pre-training text: episodes of every protocol by a deliberately sloppy author.

Each trace exercises what the model must be able to do (speak the protocol, copy a name, read a result), but its author's policy is
poor, as a base model's is: it guesses, asks for the wrong thing, breaks tags, or reads the right page and writes down something
else. Good and bad traces open alike, so that what reinforcement learning has to change is the choice, not the ability.
"""
import random
import re

from common.search import Passage
from common.tiny.protocols import END_OF_TEXT, IM_END, NOTICE, PROTOCOLS, Protocol
from common.tiny.world import (CITY, JOB, RIVER, Problem, Question, Request, World, problem, request, run_program, tool_value, world)

# share of traces per protocol; longer or harder protocols get more
MIXTURE = {"search_r1": 16, "otc": 7, "research": 10, "r1_searcher": 10, "deep_researcher": 10, "swirl": 8, "swirl_math": 6,
           "torl": 9, "retool": 9, "toolrl": 12, "tool_n1": 10}
# added later in pre-training: plain reading comprehension, always right, in no protocol. It teaches to find the fact that
# was asked for, which the sloppy traces show too rarely; what to do with that ability is left to each method.
READING = {"reading": 28, "polish": 70, "professions": 150}  # its weight beside MIXTURE, by phase of pre-training

# what the author does, and how often (per family)
POLICY = {
    "search": {"guess": 25, "no_tags": 6, "broken_call": 4, "wrong_query": 10, "stop_early": 10, "misread": 20, "right": 25},
    "math": {"guess": 25, "no_tags": 6, "broken_call": 6, "wrong_query": 20, "misread": 20, "right": 25},
    "tools": {"wrong_tool": 18, "wrong_value": 22, "missing": 12, "no_call": 12, "broken_call": 8, "extra": 8, "right": 25},
}
LOOK = ("I should look up {}.", "I need to find {}.", "First I look up {}.")
NEXT = ("Now I look up {}.", "Next I need {}.")
DONE = ("Now I can answer.", "That settles it.", "I know enough.")
COMPUTE = ("I compute it.", "Let me calculate.", "This needs a computation.")

Segment = tuple[str, str]  # (who wrote it: prompt, model, tool or notice; text)


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
        rows = ", ".join(f'{{"title": {p.title}, "url": "{self.address(p)}", "quick_summary": "A page about {p.title[1:-1]}."}}' for p in hits)
        return f'[{{"search_query": "{argument}", "web_page_info_list": [{rows}]}}]'


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


def search_trace(protocol: Protocol, rng: random.Random, q: Question, w: World) -> list[Segment]:
    policy = _draw(rng, POLICY["search"])
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

    def answer(value: str):
        turn(protocol.answer(rng.choice(DONE), value))

    if policy == "broken_call":  # an action nobody can execute, then (where the method says so) a notice, then go on
        text = protocol.call(rng.choice(LOOK).format(q.entity or "it"), q.entity or "it")
        text = re.sub(r" ?(</search>|</search_query>|<\|end_of_query\|>|</tool_call>)", "", text)
        if protocol.name not in ("search_r1", "otc"):
            turn(text if text.endswith(protocol.end) else text + protocol.end)
            return out
        turn(text.removesuffix(IM_END) + IM_END)
        out.append(("notice", NOTICE))
        policy = rng.choice(("right", "misread", "guess"))
    if policy == "guess" or (policy == "right" and not q.hops):
        named = _values(q.text)
        guess = rng.choice(named + [rng.choice(rng.choice((CITY, RIVER, JOB))), str(rng.randrange(1800, 2020))])
        answer(q.answer if policy == "right" else guess)
        return out
    if policy == "wrong_query":
        wrong = rng.choice((rng.choice(list(w.facts)), rng.choice(("the mayor", "the author", "the river", "the birthplace")), rng.choice(_values(q.text))))
        look(wrong)
    else:
        hops = q.hops[:1] if policy == "stop_early" else q.hops
        for i, (entity, _) in enumerate(hops):
            look(entity, LOOK if i == 0 else NEXT)
            if policy == "misread" and rng.random() < 0.1:  # the same question twice
                look(entity, NEXT)
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


def math_trace(protocol: Protocol, rng: random.Random, p: Problem) -> list[Segment]:
    policy = _draw(rng, POLICY["math"])
    out: list[Segment] = [("prompt", protocol.prompt(p))]
    numbers = re.findall(r"\d+", p.text)
    turn = lambda text: out.append(("model", text))
    answer = lambda value: turn(protocol.answer(rng.choice(DONE), value))

    def compute(expression: str, program: str | None = None):
        argument = expression if protocol.name == "swirl_math" else program or _program(rng, expression)
        turn(protocol.call(rng.choice(COMPUTE), argument))
        result = use_tool(protocol, argument, None, None, 0)
        out.append(("tool", protocol.observe(argument, result)))
        return result

    if policy == "guess" or (p.easy and policy == "right" and rng.random() < 0.7):
        answer(p.answer if p.easy and rng.random() < 0.8 else rng.choice((rng.choice(numbers), str(rng.randrange(10, 5000)))))
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


def tools_trace(protocol: Protocol, rng: random.Random, r: Request) -> list[Segment]:
    policy = _draw(rng, POLICY["tools"])
    calls = [(n, dict(a)) for n, a in r.calls]
    named = [n for n in _values(r.text) if n != "Please"] + re.findall(r"\d+", r.text)
    spare = rng.choice(r.tools)
    call_of = lambda t: (t.name, {p: (int(x) if kind == "integer" and (x := rng.choice(named or ["2"])).isdigit() else tool_value(rng, p, kind))
                                  for p, (kind, _) in t.parameters.items()})
    if policy == "no_call" and calls:
        calls = []
    elif policy == "extra" or (policy != "right" and not calls):
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
    thought = "No tool fits." if not calls else "I need " + " and ".join(n for n, _ in calls) + "."
    text = protocol.answer(thought, calls)
    if policy == "broken_call":
        text = rng.choice((text.replace("</tool_call>", ""), text.replace("}", "", 1), re.sub(r"<think>.*?</think>\n", "", text)))
    return [("prompt", protocol.prompt(r)), ("model", text)]


def reading_trace(rng: random.Random, q: Question, w: World) -> list[Segment]:
    """The passages that hold the answer among others, the question, the answer."""
    names = [entity for entity, _ in q.hops] + rng.sample(list(w.facts), rng.randrange(0, 3))
    rng.shuffle(names)
    order = list(w.facts)
    text = "\n".join(w.passages[order.index(name)].text for name in dict.fromkeys(names))
    return [("prompt", f"{text}\nQuestion: {q.text}"), ("model", f"\n<answer> {q.answer} </answer>{END_OF_TEXT}")]


def _draw(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def task(family: str, seed: int, number: int) -> Question | Problem | Request:
    """Task `number` of a family in the world of a seed; search tasks have 0, 1 or 2 hops (5, 50 and 45 %)."""
    if family == "search":
        return world(seed).question(number, random.Random(f"hops {seed} {number}").choices((0, 1, 2), (0.05, 0.5, 0.45))[0])
    return problem(seed, number) if family == "math" else request(seed, number)


def trace(seed: int, number: int, protocol: str | None = None, phase: str = "traces") -> tuple[str, list[Segment]]:
    """One pre-training episode: (protocol, segments). Worlds of pre-training have negative seeds; no run ever uses those."""
    rng = random.Random(f"trace {seed} {number}")
    name = protocol or _draw(rng, {**MIXTURE, "reading": READING.get(phase, 0)})
    world_seed = -1 - (seed * 1_000_003 + number) // 256
    if name == "reading":
        w = world(world_seed)
        tries = [w.question(number + 1000 * i, rng.choices((1, 2), (0.6, 0.4))[0]) for i in range(12)]
        wanted = [q for q in tries if q.answer in JOB] if phase == "professions" and rng.random() < 0.7 else tries
        return name, reading_trace(rng, (wanted or tries)[0], w)
    p = PROTOCOLS[name]
    t = task(p.family, world_seed, number)
    if p.family == "search":
        return name, search_trace(p, rng, t, world(world_seed))
    return name, (math_trace if p.family == "math" else tools_trace)(p, rng, t)
