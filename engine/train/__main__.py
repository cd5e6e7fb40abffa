"""`python -m engine.train`: train polyglot-moe or polyglot-draft and write the model folder.

The same steps and seed give the same run. A run folder with a checkpoint is continued.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.errors import ConfigError, WorkbenchError
from engine.train.batches import token_bytes, token_streams
from engine.train.data import CORPUS
from engine.train.export import export_model
from engine.train.network import MODELS, Network
from engine.train.tokenizer import train_tokenizer
from engine.train.trainer import HISTORY, Reporting, TrainConfig, Trainer, train

DEFAULT_STEPS = {"moe": 4000, "draft": 1500}
NAMES = {"moe": "polyglot-moe", "draft": "polyglot-draft"}


def main(arguments: list[str] | None = None) -> int:
    """Train one model and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.train", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="moe")
    parser.add_argument("--out", type=Path, help="model folder (data/models/polyglot-…)")
    parser.add_argument("--run", type=Path, help="checkpoints (build/train/…)")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="corpus folder")
    parser.add_argument("--steps", type=int, help="number of steps, known beforehand")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-tokens", type=int, default=8192, help="tokens of one step")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use; else train one")
    parser.add_argument("--teacher", type=Path, help="run folder of the model to distil from")
    parser.add_argument("--check-every", type=int, default=250, help="steps between checks")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    return parser


def _run(options: argparse.Namespace) -> None:
    say = partial(print, flush=True)
    run = options.run or Path("build/train") / options.model
    out = options.out or CORPUS.parent / "models" / NAMES[options.model]
    run.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(options.tokenizer, run, options.corpus)
    config = TrainConfig(
        model=options.model,
        num_steps=options.steps or DEFAULT_STEPS[options.model],
        seed=options.seed,
        step_tokens=options.step_tokens,
    )
    streams = token_streams(tokenizer, "train", options.corpus)
    trainer = Trainer(
        config,
        streams,
        teacher=_teacher(options.teacher) if options.teacher else None,
        compiled=not options.no_compile,
    )
    total, active = trainer.network.num_parameters()
    say(
        f"{options.model}: {total:,} parameters, {active:,} active; corpus of"
        f" {sum(map(len, streams.values())):,} tokens"
    )
    if trainer.restore(run):
        say(f"continuing at step {trainer.num_done} of {config.num_steps}")
    reporting = Reporting(check_every=options.check_every, save_every=options.save_every)
    heldout = token_streams(tokenizer, "heldout", options.corpus)
    train(trainer, run, heldout, token_bytes(tokenizer), reporting, say)
    export_model(trainer.network.state_dict(), MODELS[options.model], tokenizer, out)
    shutil.copyfile(run / HISTORY, out.with_name(f"{out.name}.{HISTORY}"))
    say(f"wrote {out}")


def _tokenizer(given: Path | None, run: Path, corpus: Path) -> Tokenizer:
    """Take the given tokenizer, the run's own, or train one; keep a copy in the run folder."""
    kept = run / "tokenizer.json"
    if given is None and kept.is_file():
        return Tokenizer.from_file(str(kept))
    if given is not None and not given.is_file():
        raise ConfigError(f"tokenizer ({given}) is not a file; give a tokenizer.json.")
    tokenizer = Tokenizer.from_file(str(given)) if given else train_tokenizer(corpus)
    tokenizer.save(str(kept))
    return tokenizer


def _teacher(run: Path) -> Network:
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    network = Network(MODELS[saved["settings"]["model"]])
    network.load_state_dict(saved["network"])
    # In training mode the teacher has the fixed shapes that compile; a mixed batch drops little.
    return network.train().requires_grad_(False)


if __name__ == "__main__":
    sys.exit(main())
