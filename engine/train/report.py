"""`python -m engine.train.report`: measure the shipped models and write their READMEs.

Everything is measured on held-out text with the shipped files, in bf16, dropless. Takes a few
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.errors import WorkbenchError
from engine.train.acceptance import Acceptance, agreement, count_accepted, greedy_text
from engine.train.batches import Stream, evaluation_windows, token_bytes, token_streams
from engine.train.data import CORPUS, documents
from engine.train.evaluate import bits_by_domain
from engine.train.loading import load_network
from engine.train.network import Network
from engine.train.specialisation import expert_counts, information_by_layer, masking_cost
from engine.train.tables import DraftReport, MoEReport, draft_page, moe_page

MODELS_FOLDER = CORPUS.parent / "models"
ALL = 10**6
COUNT_WINDOWS = 96
MASK_WINDOWS = 8
ACCEPTANCE_TEXTS = 8
PROMPT_TOKENS, NEW_TOKENS = 64, 64
PROPOSALS = (2, 4)
SAMPLE_DOCUMENT, SAMPLE_PROMPT, SAMPLE_TOKENS = 4, 16, 40


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the pages, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.train.report", description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS_FOLDER, help="folder of both models")
    parser.add_argument("--only", choices=("moe", "draft"), help="write one page only")
    options = parser.parse_args(arguments)
    target_folder, draft_folder = (
        options.models / name for name in ("polyglot-moe", "polyglot-draft")
    )
    try:
        target = load_network(target_folder)
        tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
        heldout = token_streams(tokenizer, "heldout")
        if options.only != "draft":
            history = _read_history(options.models / "polyglot-moe.history.jsonl")
            page = moe_page(measure_moe(target, tokenizer, heldout, history))
            (target_folder / "README.md").write_text(page, encoding="utf-8")
            print(page)
        if options.only != "moe":
            draft = load_network(draft_folder)
            page = draft_page(measure_draft(draft, target, heldout, token_bytes(tokenizer)))
            (draft_folder / "README.md").write_text(page, encoding="utf-8")
            print(page)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def measure_moe(
    network: Network,
    tokenizer: Tokenizer,
    heldout: Mapping[str, Stream],
    history: list[dict[str, object]],
) -> MoEReport:
    """Measure the target: bits per byte, use of experts, cost of masking, samples."""
    bytes_V = token_bytes(tokenizer)
    available = min(len(stream) // 256 for stream in heldout.values())
    same_number = min(COUNT_WINDOWS, available)
    counts = {
        domain: expert_counts(network, evaluation_windows(stream, same_number, 256))
        for domain, stream in heldout.items()
    }
    masked = {
        domain: evaluation_windows(stream, MASK_WINDOWS, 256) for domain, stream in heldout.items()
    }
    return MoEReport(
        config=network.config,
        num_parameters=network.num_parameters(),
        bits=bits_by_domain(network, heldout, bytes_V, num_windows=ALL),
        bits_long=bits_by_domain(network, heldout, bytes_V, num_windows=ALL, context=512),
        counts=counts,
        information=information_by_layer(counts),
        masking=list(masking_cost(network, masked, bytes_V)),
        samples={domain: _sample(network, tokenizer, domain) for domain in heldout},
        history=history,
    )


def measure_draft(
    draft: Network, target: Network, heldout: Mapping[str, Stream], bytes_V: Tensor
) -> DraftReport:
    """Measure the draft: acceptance by domain and bits per byte."""
    accepted: dict[str, list[Acceptance]] = {}
    for domain, stream in heldout.items():
        prompts = evaluation_windows(stream, ACCEPTANCE_TEXTS, PROMPT_TOKENS - 1)
        text = greedy_text(target, prompts, NEW_TOKENS)
        agrees = agreement(draft, text, PROMPT_TOKENS)
        accepted[domain] = [count_accepted(agrees, number) for number in PROPOSALS]
    return DraftReport(
        config=draft.config,
        num_parameters=draft.num_parameters()[0],
        bits=bits_by_domain(draft, heldout, bytes_V, num_windows=ALL),
        accepted=accepted,
    )


def _sample(network: Network, tokenizer: Tokenizer, domain: str) -> tuple[str, str]:
    document = next(islice(documents(domain, "heldout"), SAMPLE_DOCUMENT, None))
    prompt = tokenizer.encode(document.text).ids[:SAMPLE_PROMPT]
    written = greedy_text(network, torch.tensor([prompt]), SAMPLE_TOKENS)[0].tolist()
    return (
        tokenizer.decode(prompt).replace("\n", " ⏎ "),
        tokenizer.decode(written[len(prompt) :]),
    )


def _read_history(path: Path) -> list[dict[str, object]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
