"""TRL's side of the benchmark: run by tests/bench_trl.py, in TRL's environment, as `python -m tests.bench_trl_trainer JOB.json`.

A line on stdin starts a training step; a JSON line on stdout says what it took. What TRL prints goes to stderr.
"""
import json
import os
import sys
import time
from pathlib import Path

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from tests import bench_trl_task as task


def say(what: dict) -> None:
    print(json.dumps(what), file=answers, flush=True)


class Gate(TrainerCallback):
    """Waits for the word before each step, and takes its time."""

    def on_step_begin(self, args, state, control, **kwargs):
        say({"ready": state.global_step})
        if not sys.stdin.readline():
            sys.exit("the benchmark has gone")
        self.started = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.ended = time.process_time()

    def on_log(self, args, state, control, logs=None, **kwargs):  # comes after on_step_end, so writing the log is not in the time
        if "completions/mean_length" in logs:  # tokens the model sampled: TRL leaves tool results out of it
            say({"seconds": self.ended - self.started, "sample_s": self.sampled - self.started, "length": logs["completions/mean_length"],
                 "longest": logs["completions/max_length"], "calls": logs.get("tools/call_frequency", 0.0)})


def main(job: dict) -> None:
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if job["tools"]:
        tokenizer.chat_template, tokenizer.response_template = task.CHAT_TEMPLATE, qwen3_template
        ids = tokenizer.apply_chat_template(job["prompts"][0], add_generation_prompt=True, return_dict=False)
        extra = {"max_new_tokens": job["turn_tokens"]}  # a limit for one turn; TRL's own setting limits the whole trajectory
    else:  # an end token beyond the model's vocabulary: never sampled, so every completion has the full length
        tokenizer.add_special_tokens({"eos_token": "<|never|>"})
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        ids, extra = tokenizer(job["prompts"][0])["input_ids"], {}
    assert ids == job["first_ids"], "the two sides would not see the same prompt"
    gate, n = Gate(), job["n_prompts"] * job["samples"]

    def score(completions, answer, **kwargs):
        gate.sampled = time.process_time()
        return [task.reward(c if isinstance(c, str) else c[-1]["content"], a) for c, a in zip(completions, answer)]

    parts = n // job["micro_batch"]
    config = GRPOConfig(
        output_dir=job["scratch"], max_steps=job["steps"], num_generations=job["samples"], per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=parts, max_completion_length=job["trajectory_tokens"], max_tool_calling_iterations=job["turns"],
        generation_kwargs=extra, temperature=1.0, top_k=0, top_p=1.0, beta=0.0, num_iterations=1, epsilon=job["clip"], loss_type="dapo",
        scale_rewards="group", learning_rate=job["lr"], lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=1.0, use_vllm=False,
        use_cpu=True, bf16=False, gradient_checkpointing=False, shuffle_dataset=False, dataloader_pin_memory=False, disable_tqdm=True,
        report_to="none", save_strategy="no", logging_steps=1, seed=0)
    GRPOTrainer(model=model, args=config, processing_class=tokenizer, reward_funcs=score, callbacks=[gate],
                train_dataset=Dataset.from_dict({"prompt": job["prompts"], "answer": job["answers"]}),
                tools=list(task.TOOLS.values()) if job["tools"] else None).train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
