"""Success rate of a tiny model on every protocol, before any reinforcement learning: `python -m common.tiny.measure [FOLDER]`."""
import json
import random
import sys
from pathlib import Path

import torch

from common.data import Example
from common.engine import HFEngine
from common.policy import load_model
from common.rollout import Budget, Call, End, Notice, Tool, ToolPool, Prompt, rollout
from common.scoring import bootstrap_interval
from common.tiny.protocols import NOTICE, PROTOCOLS, succeeded
from common.tiny.traces import make_web, task, use_tool
from common.tiny.world import EVAL, world


def success_rates(folder: Path | str, n: int = 200, temperature: float = 1.0) -> dict[str, dict]:
    """{protocol: {"success", "interval", "n", "calls"}}: sampled at temperature 1 on tasks of worlds nobody trained on."""
    model, tokenizer = load_model(str(folder))
    engine, pool = HFEngine(model, tokenizer, max_slots=n, max_length=1700), ToolPool()
    out = {}
    for name, p in PROTOCOLS.items():
        tasks = [task(p.family, EVAL + i % 4, i) for i in range(n)]
        webs = [make_web(random.Random(i), world(EVAL + i % 4)) if name == "deep_researcher" else None for i in range(n)]
        prompts = []
        for i, t in enumerate(tasks):
            text = p.prompt(t)
            prompts.append(Prompt(Example(str(i), t.text, ("?",)), text, tokenizer.encode(text, add_special_tokens=False)))

        def act(turn, trajectory):
            action = p.parse(turn.text)
            if action and action[0] == "answer":
                return End("answer")
            if action:
                return Call("tool", action[1], str)
            return Notice(NOTICE) if name in ("search_r1", "otc") else End("no_action")

        def use(calls):
            i = int(calls[0].example.id)
            argument = calls[0].argument
            return [p.observe(argument, use_tool(p, argument, world(EVAL + i % 4), webs[i], 2))]

        budget = Budget(prompt_tokens=600, turn_tokens=120, observation_tokens=400, trajectory_tokens=1050, turns=5)
        trajectories = rollout(engine, tokenizer, prompts, act, {"tool": Tool(use)}, budget, pool, temperature=temperature, stop=p.stops, seed=1)
        right = [float(succeeded(p, tasks[int(t.example.id)], t.segments[-1].text)) for t in trajectories]
        out[name] = {"success": sum(right) / n, "interval": bootstrap_interval(right), "n": n, "calls": sum(len(t.calls) for t in trajectories) / n}
        print(f"{name:16} {out[name]['success']:.3f}  calls {out[name]['calls']:.2f}", flush=True)
    pool.close()
    return out


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps(success_rates(sys.argv[1] if len(sys.argv) > 1 else "tiny"), indent=1))
