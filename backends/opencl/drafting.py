"""Draft trees that are made on a device: level by level, without a round trip for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.backends.device_session import Batch, chain_batch
from edgeinfer.backends.opencl.cache import Cache
from edgeinfer.backends.opencl.decoder import Decoder
from edgeinfer.backends.opencl.parts import TOP
from edgeinfer.common.types import Nodes


def draft_tree(
    decoder: Decoder,
    cache: Cache,
    batch: Batch,
    n_levels: int,
    width: int,
    n_logits: int,
    assumed: Sequence[int] = (),
) -> Nodes:
    """Run a chain, then levels of a tree behind it, all chosen on the device; see DraftingSession.draft.

    n_logits: the first of a row, that nodes are chosen from.  assumed: see DraftingHead.draft. Nothing is read before
    the end, so that the host waits for the device once.
    """
    buffers, n_nodes = decoder.buffers, n_levels * width
    decoder.run(cache, batch)
    for token in assumed:
        _hand_on(decoder, len(batch) - 1)
        batch = chain_batch(np.array([token], dtype=np.int32), batch.n_past + len(batch))
        decoder.run(cache, batch)
    last, n_past = len(batch) - 1, batch.n_past + len(batch)
    rows, before = np.array([last], dtype=np.int32), -1 - last  # the first level follows "node" -1, in that row
    for first in range(0, n_nodes, width):
        decoder.make_logits(rows)
        _choose(decoder, len(rows), width, before, first, n_nodes, n_logits)
        if first + width < n_nodes:
            places = np.arange(first + width, dtype=np.int32) // width + np.int32(n_past)
            batch = Batch(np.zeros(width, dtype=np.int32), places, None, n_past, n_nodes, first)
            decoder.write_places(cache, batch)
            _hand_on_to_level(decoder, first, width, before)
            decoder.embed(buffers["node_ids"], width, first)
            decoder.run_layers(cache, batch)
            rows, before = np.arange(width, dtype=np.int32), first
    return _read(decoder, n_nodes, n_nodes - width + 1)


def _read(decoder: Decoder, n_nodes: int, n_rows: int) -> Nodes:
    """The tree that was made. n_rows: the text, and the nodes that were passed."""
    shapes = {"node_ids": (n_nodes,), "parents": (n_nodes,), "candidates": (n_rows, TOP)}
    ids, parents, candidates = (
        decoder.device.read(decoder.buffers[name], np.empty(shape, dtype=np.int32)) for name, shape in shapes.items()
    )
    shapes = {"node_probabilities": (n_nodes,), "probabilities": (n_rows, TOP)}
    p, probabilities = (
        decoder.device.read(decoder.buffers[name], np.empty(shape, dtype=np.float32)) for name, shape in shapes.items()
    )
    return Nodes(ids, parents, p, candidates, probabilities)


def _hand_on(decoder: Decoder, row: int) -> None:
    """Let that row of the last batch, which a head gave, be the feature of the next token."""
    if decoder.weights.fusion is not None:
        buffers, size = decoder.buffers, decoder.spec.n_embd
        decoder.device.write(buffers["rows"], np.array([row], dtype=np.int32))
        decoder.launch("take_rows", [size, 1], [16, 1], buffers["x"], buffers["rows"], buffers["features"], size)


def _hand_on_to_level(decoder: Decoder, first: int, width: int, before: int) -> None:
    """Let rows of the last batch, from node `before` on, be the features of the nodes from `first` on."""
    if decoder.weights.fusion is not None:
        buffers, size = decoder.buffers, decoder.spec.n_embd
        nodes = buffers["x"], buffers["parents"], buffers["features"], size, first, before
        decoder.launch("take_parents", [size, width], [16, 1], *nodes)


def _choose(decoder: Decoder, n_rows: int, width: int, before: int, first: int, n_nodes: int, n_logits: int) -> None:
    """Choose the level of a tree that begins with node `first`, by the logits of that which begins `before`."""
    buffers, group, vocabulary = decoder.buffers, [decoder.group, 1], decoder.weights.draft_vocab
    candidates, first_row = (buffers["candidates"], buffers["probabilities"]), before + 1 if first else 0
    items, names = [decoder.group, n_rows], buffers["ids"] if vocabulary is None else vocabulary
    decoder.launch(
        *("top_k", items, group, buffers["logits"], *candidates, names, int(vocabulary is not None)),
        *(n_logits, decoder.spec.n_logits, first_row),
    )
    nodes = (buffers[x] for x in ("node_ids", "parents", "node_probabilities", "path_probabilities", "sees"))
    decoder.launch("choose_level", [1], [1], *candidates, *nodes, first_row, n_rows, width, before, first, n_nodes)
