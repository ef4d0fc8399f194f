"""The worker of `benchmarks.serving`: transformers' `generate` on the same checkpoint.

Reads commands from standard input and answers on standard output, one JSON object per line:

    {"load": DIR, "threads": n}                 -> versions
    {"prompts": [[...]], "new": n, "batch": b}  -> {"tokens": [[...]], "seconds": s, "cpu": s}

Prompts are taken `batch` at a time, padded on the left, greedily, without a stop token.
"""

import json
import sys
import time


def load(directory: str, threads: int):
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return model, {**versions, "threads": torch.get_num_threads()}


def generate(model, prompts: list[list[int]], new: int, batch: int) -> list[list[int]]:
    import torch

    tokens = []
    for begin in range(0, len(prompts), batch):
        group = prompts[begin : begin + batch]
        longest = max(map(len, group))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in group])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        tokens += out[:, longest:].tolist()
    return tokens


def main() -> None:
    model = None
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            model, answer = load(command["load"], command["threads"])
        else:
            begin, cpu = time.perf_counter(), time.process_time()
            tokens = generate(model, command["prompts"], command["new"], command["batch"])
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            answer = {"tokens": tokens, "seconds": seconds, "cpu": cpu}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
