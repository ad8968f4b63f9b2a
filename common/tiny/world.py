"""The embedded world: facts, passages, questions, sums and tool requests, all drawn from a seed.

Two worlds share names but no facts: who was born where, who wrote what and which river runs through a city are drawn anew for
every seed. So a policy trained on one world can only answer questions about another by looking things up.

Names are single words (a book is "The" and a word), so that each is one entry of the tiny vocabulary: copying a name costs a model of
two million parameters one step, and what is left to learn is when to look up what.
"""
import ast
import json
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from common.data import Example, trajectory_seed
from common.search import BM25, Passage

FIRST = ("Mira Tomas Elena Viktor Nadia Oscar Petra Ruben Sofia Hugo Irena Jonas Klara Leo Marta Nils Olga Pavel Rosa Stefan "
         "Tilda Anton Vera Walter Agnes Boris Celia Dario Edith Felix").split()
LAST = ("Holt Reed Orlov Brandt Lindt Moss Novak Okoye Penn Quist Rossi Stone Tanner Ulm Vance Weber Young Adler Bauer Costa "
        "Drake Ekman Falk Garza Hale Ivers Jung Keller Lund Marsh").split()
CITY = ("Velmora Harwick Tarrin Osterby Lunde Calder Mirren Dunmore Sorrel Brava Eskel Fenton Galway Ilmar Jasper Kirov Lorca Marl "
        "Norden Ostrava Pella Quill Raven Sable Torun Umbra Varna Wells Yarrow Zadar").split()
RIVER = "Arne Bole Cree Dove Esk Fal Greta Hull Isar Jade Kama Lech Main Neva Oder Po Ruhr Saal Tern Ure".split()
ADJECTIVE = "Silver Hidden Last Broken Quiet Golden Distant Burning Frozen Secret Empty Crimson Lonely Wild Ancient Pale".split()
NOUN = "Lantern Garden Bridge Winter Mirror Harbor Letter Orchard Island Shadow River Clock Tower Forest Voyage Summer".split()
JOB = "painter composer surgeon lawyer farmer pilot teacher chemist sculptor baker judge sailor architect dentist".split()
ITEM = "lamps chairs books coins apples bricks boxes shirts cups tickets".split()
DAY = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


@dataclass(frozen=True)
class Question:
    """A question with the chain of look-ups that answers it: `hops` holds (entity to look up, value found there)."""
    id: str
    text: str
    answer: str
    hops: tuple[tuple[str, str], ...]

    @property
    def entity(self) -> str:
        return self.hops[0][0] if self.hops else ""


# attribute -> how a one-hop question asks for it, and how it asks through another question ("the author of X")
ASK = {
    "born": ("Where was {} born?", "In which city was {} born?"),
    "year": ("In which year was {} born?", "When was {} born?"),
    "job": ("What is the profession of {}?", "What does {} do for a living?"),
    "author": ("Who wrote {}?", "Who is the author of {}?"),
    "published": ("When was {} published?", "In which year did {} come out?"),
    "river": ("Which river runs through {}?", "On which river does {} lie?"),
    "mayor": ("Who is the mayor of {}?", "Who governs {} as mayor?"),
}
OF = {"author": "the author of {}", "born": "the birthplace of {}", "mayor": "the mayor of {}"}
PERSON, BOOK, PLACE = ("born", "year", "job"), ("author", "published"), ("river", "mayor")
THEN = {"author": PERSON, "born": PLACE, "mayor": PERSON}  # what can be asked about the value of a first look-up


@dataclass
class World:
    seed: int
    n_people: int = 40
    n_books: int = 28
    facts: dict[str, dict[str, str]] = field(default_factory=dict)  # entity -> attribute -> value
    passages: list[Passage] = field(default_factory=list)

    def __post_init__(self):
        rng = random.Random(f"world {self.seed}")
        people = rng.sample(FIRST + LAST, self.n_people)
        books = [f"The {word}" for word in rng.sample(ADJECTIVE + NOUN, self.n_books)]
        cities = rng.sample(CITY, 24)
        year = lambda low, high: str(rng.randrange(low, high))
        texts = {}
        for name in people:
            fact = self.facts[name] = {"born": rng.choice(cities), "year": year(1800, 1960), "job": rng.choice(JOB)}
            texts[name] = rng.choice((
                f"{name} is a {fact['job']}. {name} was born in {fact['born']} in {fact['year']}.",
                f"{name} was born in {fact['year']} in {fact['born']} and works as a {fact['job']}."))
        for name in books:
            fact = self.facts[name] = {"author": rng.choice(people), "published": year(1840, 2020)}
            texts[name] = rng.choice((f"{name} is a novel by {fact['author']}, published in {fact['published']}.",
                                      f"{name} was written by {fact['author']}. It came out in {fact['published']}."))
        for name in cities:
            fact = self.facts[name] = {"river": rng.choice(RIVER), "mayor": rng.choice(people)}
            texts[name] = rng.choice((f"{name} is a city on the {fact['river']} river. Its mayor is {fact['mayor']}.",
                                      f"The mayor of {name} is {fact['mayor']}. The city lies on the {fact['river']} river."))
        self.passages = [Passage(str(i), f'"{name}"\n{text}') for i, (name, text) in enumerate(texts.items())]

    @cached_property
    def index(self) -> BM25:
        return BM25(self.passages)

    def page(self, entity: str) -> Passage:
        return self.passages[list(self.facts).index(entity)]

    def question(self, number: int, hops: int, about: str | None = None) -> Question:
        """Question `number` of this world (about an entity): 0 hops (the fact stands in the question), 1 or 2 look-ups."""
        rng = random.Random(f"question {self.seed} {number} {hops}")
        entity = about or rng.choice(list(self.facts))
        attributes = list(self.facts[entity])
        if hops == 2:
            answer = entity
            while answer == entity:  # the mayor of his own birthplace would stand in the question
                first = rng.choice([a for a in attributes if a in THEN])
                middle = self.facts[entity][first]
                last = rng.choice(THEN[first])
                answer = self.facts[middle][last]
            text = rng.choice(ASK[last]).format(OF[first].format(entity))
            chain = ((entity, middle), (middle, answer))
        else:
            last = rng.choice(attributes)
            answer = self.facts[entity][last]
            text = rng.choice(ASK[last]).format(entity)
            chain = ((entity, answer),) if hops else ()
            if hops == 0:
                text = f"{self.page(entity).text} {text}"
        return Question(f"w{self.seed}-{hops}hop-{number}", text, answer, chain)


@lru_cache(maxsize=64)
def world(seed: int) -> World:
    return World(seed)


# Pre-training uses negative seeds, training 1,000 x run seed + 0..., evaluation EVAL + 0...: no two ever share a fact.
EVAL = 10**9


def questions(split: str, n: int, seed: int = 0, hops: tuple[int, ...] = (1, 2), worlds: int = 8) -> list[Example]:
    """n questions for a split ("train": worlds of this seed; "eval": always the same ones), hops in turn; meta: hops, world."""
    base = EVAL if split == "eval" else 1000 * seed
    out = []
    for i in range(n):
        q = world(base + i // len(hops) % worlds).question(i, hops[i % len(hops)])
        out.append(Example(q.id, q.text, (q.answer,), {"hops": hops[i % len(hops)], "world": base + i // len(hops) % worlds}))
    return out


# ---- sums whose answers need computing --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Problem:
    id: str
    text: str
    expression: str  # Python
    answer: str
    easy: bool  # one-digit: the model knows it without a tool


def problem(seed: int, number: int, easy: bool | None = None) -> Problem:
    rng = random.Random(f"problem {seed} {number}")
    easy = rng.random() < 0.15 if easy is None else easy
    if easy:
        a, b = rng.randrange(1, 10), rng.randrange(1, 10)
        who, item = rng.choice(FIRST), rng.choice(ITEM)
        expression, text = rng.choice(((f"{a} + {b}", f"{who} has {a} {item} and buys {b} more. How many {item} does {who} have?"),
                                       (f"{a} + {b}", f"What is {a} + {b}?")))
        return Problem(f"p{seed}-{number}", text, expression, str(a + b), True)
    a, b, c = rng.randrange(12, 100), rng.randrange(12, 100), rng.randrange(100, 1000)
    who, item = rng.choice(FIRST), rng.choice(ITEM)
    expression, text = rng.choice((
        (f"{a} * {b}", f"A shop sells {a} {item} a day. How many {item} does it sell in {b} days?"),
        (f"{a} * {b}", f"What is {a} * {b}?"),
        (f"{c} - {a} * 3", f"{who} has {c} {item} and gives {a} {item} to each of 3 friends. How many {item} are left?"),
        (f"{a} * {b} + {c}", f"What is {a} * {b} + {c}?"),
        (f"{a} * {b} + {c}", f"{who} packs {a} boxes with {b} {item} each and finds {c} more {item}. How many {item} are there?"),
        (f"{c} - {a} - {b}", f"{who} had {c} {item}, lost {a} and sold {b}. How many {item} are left?"),
    ))
    return Problem(f"p{seed}-{number}", text, expression, str(eval_int(expression)), False)


def problems(split: str, n: int, seed: int = 0, easy: float = 0.15) -> list[Example]:
    """n sums for a split, as `questions`; a share of `easy` ones needs no program; meta: kind. Sums share no numbers but by chance."""
    base, out = EVAL if split == "eval" else 1000 * seed, []
    for i in range(n):
        p = problem(base, i, random.Random(f"easy {base} {i}").random() < easy)
        out.append(Example(p.id, p.text, (p.answer,), {"kind": "easy" if p.easy else "hard", "expression": p.expression}))
    return out


_OPS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.USub: operator.neg}


def eval_int(expression: str, names: dict[str, int] | None = None) -> int:
    """Integer arithmetic with named values; raises NameError, SyntaxError, ZeroDivisionError or TypeError as Python would."""
    def value(node):
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**12:
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in (names or {}):
                raise NameError(f"name '{node.id}' is not defined")
            return names[node.id]
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPS:
            return _OPS[type(node.op)](value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPS:
            return _OPS[type(node.op)](value(node.left), value(node.right))
        raise TypeError(f"{type(node).__name__} is not integer arithmetic")
    return value(ast.parse(expression.strip(), mode="eval"))


def run_program(code: str) -> str:
    """Output of a program made of integer assignments and print(expression), or its last error line. It stands in for a sandbox
    while the model is built and measured; nothing is ever executed."""
    names, out = {}, []
    try:
        for node in ast.parse(code).body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = eval_int(ast.unparse(node.value), names)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "print":
                out.append(" ".join(str(eval_int(ast.unparse(a), names)) for a in node.value.args))
            elif isinstance(node, ast.Expr):
                eval_int(ast.unparse(node.value), names)
            else:
                raise TypeError(f"{type(node).__name__} is not supported")
    except (NameError, SyntaxError, ZeroDivisionError, TypeError) as error:
        return f"{type(error).__name__}: {getattr(error, 'msg', None) or error}"
    return "\n".join(out)


# ---- requests to a set of tools ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, tuple[str, str]]  # name -> (type, description)
    ask: str  # the request, with one {} per parameter in order


TOOLS = (
    Tool("get_weather", "Weather of a city on a day", {"city": ("string", "name of the city"), "day": ("string", "day of the week")},
         "tell me the weather in {} on {}"),
    Tool("book_hotel", "Book a hotel room", {"city": ("string", "name of the city"), "nights": ("integer", "number of nights")},
         "book a hotel in {} for {} nights"),
    Tool("find_flight", "Find a flight between two cities", {"origin": ("string", "city of departure"), "destination": ("string", "city of arrival")},
         "find a flight from {} to {}"),
    Tool("order_food", "Order food for delivery", {"quantity": ("integer", "number of portions"), "dish": ("string", "name of the dish")},
         "order {} portions of {}"),
    Tool("set_timer", "Set a timer", {"minutes": ("integer", "length of the timer")}, "set a timer for {} minutes"),
    Tool("find_book", "Find a book by its title", {"title": ("string", "title of the book")}, "look up the book {}"),
    Tool("call_person", "Call a person by phone", {"name": ("string", "name of the person")}, "call {}"),
    Tool("river_level", "Water level of a river", {"river": ("string", "name of the river"), "day": ("string", "day of the week")},
         "check the level of the {} river on {}"),
    Tool("hire_worker", "Hire a worker", {"job": ("string", "profession of the worker"), "days": ("integer", "number of days")},
         "hire a {} for {} days"),
    Tool("buy_items", "Buy items in a shop", {"quantity": ("integer", "number of items"), "item": ("string", "name of the item")},
         "buy {} {}"),
    Tool("plan_meeting", "Plan a meeting with a person", {"name": ("string", "name of the person"), "day": ("string", "day of the week")},
         "plan a meeting with {} on {}"),
    Tool("rent_car", "Rent a car in a city", {"city": ("string", "name of the city"), "days": ("integer", "number of days")},
         "rent a car in {} for {} days"),
)
DISH = "soup pizza rice pasta salad curry".split()
CHAT = ("Thank you, that is all for today.", "Good morning, how are you?", "What do you like about the sea?", "Please wait, I need to think.")


def tool_value(rng: random.Random, parameter: str, kind: str) -> str | int:
    if kind == "integer":
        return rng.randrange(2, 60)
    if parameter in ("city", "origin", "destination"):
        return rng.choice(CITY)
    pool = {"day": DAY, "dish": DISH, "river": RIVER, "job": JOB, "item": ITEM}.get(parameter)
    if pool:
        return rng.choice(pool)
    if parameter == "title":
        return f"The {rng.choice(ADJECTIVE + NOUN)}"
    return rng.choice(FIRST + LAST)


@dataclass(frozen=True)
class Request:
    """A user request: `calls` holds the (name, arguments) that serve it, in order; empty when no tool fits."""
    id: str
    text: str
    tools: tuple[Tool, ...]
    calls: tuple[tuple[str, dict[str, str | int]], ...]


def request(seed: int, number: int, offered: Sequence[Tool] | None = None, shares: tuple[float, float, float] = (0.2, 0.5, 0.3)) -> Request:
    """Request `number` of a world, to the tools `offered` or to two or three that are drawn; `shares` of them need no call, one and two."""
    rng = random.Random(f"request {seed} {number}")
    n_calls = rng.choices((0, 1, 2), shares)[0]
    offered = offered or rng.sample(TOOLS, rng.randrange(2, 4))
    wanted = [rng.choice(offered) for _ in range(n_calls)] if n_calls != 2 else rng.sample(offered, 2)
    if n_calls == 0 and rng.random() < 0.7:  # asks for a tool that is not offered
        wanted = [rng.choice([t for t in TOOLS if t not in offered])]
    calls = [(t.name, {p: tool_value(rng, p, kind) for p, (kind, _) in t.parameters.items()}) for t in wanted]
    text = " and ".join(t.ask.format(*arguments.values()) for t, (_, arguments) in zip(wanted, calls))
    text = f"Please {text}." if wanted else rng.choice(CHAT)
    return Request(f"r{seed}-{number}", text, tuple(offered), tuple(calls) if n_calls else ())


def requests(split: str, n: int, seed: int = 0) -> list[Example]:
    """n requests for a split, as `questions`, that need no call, one and two in turn; meta: messages, tools (their parameters as JSON schema) and
    kind (none, single or parallel). The gold is a JSON list of calls. There are few ways to ask for a timer, so a hash of the text says which side a request is for; only
    small talk is on both."""
    base, out, number = EVAL if split == "eval" else 1000 * seed, [], 0
    while len(out) < n:
        r, number = request(base, number), number + 1
        if len(r.calls) != len(out) % 3 or (trajectory_seed(r.id if r.text in CHAT else r.text) % 5 == 0) != (split == "eval"):
            continue
        tools = [{"name": t.name, "description": t.description, "parameters": {"type": "object", "properties": {
            p: {"type": kind, "description": text} for p, (kind, text) in t.parameters.items()}}} for t in r.tools]
        out.append(Example(r.id, r.text, (json.dumps([{"name": name, "arguments": arguments} for name, arguments in r.calls]),), {
            "kind": ("none", "single", "parallel")[len(r.calls)], "messages": [{"role": "user", "content": r.text}], "tools": tools}))
    return out
