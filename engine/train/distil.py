"""`python -m engine.train.distil`: teach the draft the text that its target writes.

Starts from a trained draft. The target first writes texts after prompts of the training split
(`engine.train.written`, kept in the run folder); then the draft learns them in fixed steps, its
loss the cross-entropy against the target's most likely tokens. The same seed and steps give the
same run; acceptance on held-out prompts is printed before and after.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.errors import WorkbenchError
from engine.train.acceptance import agreement, count_accepted, greedy_text
from engine.train.batches import SHARES, Stream, evaluation_windows, token_bytes, token_streams
from engine.train.data import CORPUS
from engine.train.evaluate import bits_by_domain
from engine.train.export import export_model
from engine.train.loading import load_network
from engine.train.network import Network
from engine.train.optim import Optimiser, rate_scale
from engine.train.written import Written, draw_prompts, write

MODELS_FOLDER = CORPUS.parent / "models"
NUM_SHARE = 0.2
"""How often a text is arithmetic; the other domains keep their proportions."""
PROMPT_TOKENS, NEW_TOKENS = 48, 144
TEXTS_AT_ONCE = 256
TEXTS_PER_STEP = 42
MATRIX_RATE, RATE = 0.01, 1e-3
WARM_UP_STEPS = 40

Say = Callable[[str], None]


def main(arguments: list[str] | None = None) -> int:
    """Teach one draft and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.train.distil", description=__doc__)
    parser.add_argument("--target", type=Path, default=MODELS_FOLDER / "polyglot-moe")
    parser.add_argument("--draft", type=Path, default=MODELS_FOLDER / "polyglot-draft")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--run", type=Path, default=Path("build/train/distil"))
    parser.add_argument("--texts", type=int, default=8192, help="texts that the target writes")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace) -> None:
    def say(text: str) -> None:
        print(text, flush=True)

    options.run.mkdir(parents=True, exist_ok=True)
    target, draft = load_network(options.target), load_network(options.draft)
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    heldout = token_streams(tokenizer, "heldout")
    texts = written_texts(target, tokenizer, options.run, options.texts, options.seed, say)
    say(f"accepted before: {accepted_by_domain(draft, target, heldout)}")
    draft.requires_grad_(True)
    distil(draft.train(), texts, options.steps, options.seed, options.run / "progress.jsonl", say)
    draft.eval().requires_grad_(False)
    export_model(draft.state_dict(), draft.config, tokenizer, options.out)
    say(f"accepted after: {accepted_by_domain(draft, target, heldout)}")
    bits = bits_by_domain(draft, heldout, token_bytes(tokenizer), num_windows=16)
    rounded = {name: round(value, 3) for name, value in bits.items()}
    say(f"held-out bits per byte: {rounded}")
    say(f"wrote {options.out}")


def written_texts(
    target: Network, tokenizer: Tokenizer, run: Path, count: int, seed: int, say: Say
) -> Written:
    """Return the run's texts; let the target write them when the run has none."""
    path = run / "written.pt"
    if path.is_file():
        return Written.read(path)
    shares = {name: share * (1 - NUM_SHARE) for name, share in SHARES.items()}
    shares["num"] = NUM_SHARE * (1 - SHARES["num"])
    streams = token_streams(tokenizer, "train")
    prompts = draw_prompts(streams, shares, count, PROMPT_TOKENS, seed)
    parts, started = [], time.perf_counter()
    for part in torch.split(prompts, TEXTS_AT_ONCE):
        parts.append(write(target, part, NEW_TOKENS))
        done = len(parts) * TEXTS_AT_ONCE
        speed = done * NEW_TOKENS / (time.perf_counter() - started)
        say(f"texts {done}/{count}  {speed:,.0f} tokens/s")
    columns = ("ids_NT", "likely_NTK", "weights_NTK")
    texts = Written(**{name: torch.cat([getattr(p, name) for p in parts]) for name in columns})
    texts.save(path)
    return texts


def distil(
    draft: Network,
    texts: Written,
    num_steps: int,
    seed: int,
    progress: Path,
    say: Say,
    *,
    compiled: bool = True,
) -> None:
    """Teach `draft` the texts in `num_steps` steps of `TEXTS_PER_STEP` texts each."""
    optimiser = Optimiser(draft, matrix_rate=MATRIX_RATE, rate=RATE)
    order = torch.Generator().manual_seed(seed)
    average: float | None = None
    loss_of = torch.compile(soft_label_loss, dynamic=False) if compiled else soft_label_loss
    started = time.perf_counter()
    for step in range(num_steps):
        rows = torch.randint(len(texts.ids_NT), (TEXTS_PER_STEP,), generator=order)
        loss = loss_of(draft, *texts.batch(rows))
        torch.autograd.backward(loss)
        optimiser.step(rate_scale(step, num_steps, WARM_UP_STEPS))
        value = float(loss.detach())
        average = value if average is None else 0.95 * average + 0.05 * value
        if (step + 1) % 20 == 0 or step + 1 == num_steps:
            tokens = (step + 1) * TEXTS_PER_STEP * (texts.ids_NT.shape[1] - 1)
            speed = tokens / (time.perf_counter() - started)
            say(f"step {step + 1}/{num_steps}  loss {average:.3f}  {speed:,.0f} tokens/s")
            with progress.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step + 1, "loss": round(average, 4)}) + "\n")


def soft_label_loss(
    draft: Network, ids_BT: Tensor, likely_BTK: Tensor, weights_BTK: Tensor
) -> Tensor:
    """Return the mean cross-entropy against the kept tokens' weights, in nats per token."""
    logits_BTV, _ = draft(ids_BT, torch.bfloat16)
    logits_BTV = logits_BTV.float()
    kept_BTK = logits_BTV.gather(-1, likely_BTK) - logits_BTV.logsumexp(-1, keepdim=True)
    loss: Tensor = -(weights_BTK * kept_BTK).sum(-1).mean()
    return loss


def accepted_by_domain(
    draft: Network, target: Network, heldout: Mapping[str, Stream], num_proposed: int = 2
) -> dict[str, float]:
    """Return tokens per target step on held-out prompts, as the report counts them."""
    figures = {}
    for domain, stream in heldout.items():
        prompts = evaluation_windows(stream, 8, 63)
        agrees = agreement(draft, greedy_text(target, prompts, 64), 64)
        figures[domain] = round(count_accepted(agrees, num_proposed).tokens_per_step, 3)
    return figures


if __name__ == "__main__":
    sys.exit(main())
