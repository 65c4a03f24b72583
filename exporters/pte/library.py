"""ExecuTorch in a process of its own, its exporter and its runtime; no other file imports it, or torch for it."""

from __future__ import annotations

import gc
import importlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.backends.onnx.matrices import part_of
from edgeinfer.exporters.checks.runtime_process import peak_bytes
from edgeinfer.exporters.pte.checkpoint import params_of, weights_of
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile

MIN_RUNTIME = "executorch 1.5.1"  # what the packages were made and run with


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Export a model, or run a package: what `do` says, "export" or "run". Gives what that does, or the error.

    export: source (a GGUF file), folder (for scratch files), out (model.pte), n_ctx, four_bits, bos and eos (ids).
    run: folder (the package), prompt and tokens (ids), text (of the prompt), texts, and logits, a file that gets
    (len(tokens), n_vocab) float32, what follows the prompt and each token but the last; gives answer (a text, or
    None), and ids of each text.
    """
    try:
        found = _export(question) if question["do"] == "export" else _run(question)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
    return {**found, "version": version("executorch"), "peak_bytes": peak_bytes()}


def _export(question: dict[str, Any]) -> dict[str, Any]:
    gc.set_threshold(200_000, 20, 100)  # its graphs are many objects that stay: to look at all so often costs a fifth
    folder, out = Path(question["folder"]), Path(question["out"])
    with ModelFile.open(Path(question["source"])) as file:
        spec = read_spec(file)
        (folder / "params.json").write_text(json.dumps(params_of(file, spec)))
        _write_checkpoint(file, spec, folder)
    config = importlib.import_module("executorch.extension.llm.export.config.llm_config").LlmConfig()
    base, model, export, quantization = config.base, config.model, config.export, config.quantization
    base.checkpoint, base.params = str(folder / "checkpoint.pth"), str(folder / "params.json")
    begin = {} if question["bos"] is None else {"get_bos_id": question["bos"]}
    base.metadata = json.dumps({**begin, "get_eos_ids": question["eos"]})
    model.use_kv_cache = model.use_sdpa_with_kv_cache = True
    export.max_seq_length = export.max_context_length = question["n_ctx"]
    export.output_name = str(out)  # a name that ends in .pte is taken as a whole path
    config.backend.xnnpack.enabled = config.backend.xnnpack.extended_ops = True
    if question["four_bits"]:
        quantization.qmode, quantization.group_size = "8da4w", 32
        quantization.embedding_quantize = "8,0"
    importlib.import_module("executorch.examples.models.llama.export_llama_lib").export_llama(config)
    return {"bytes": out.stat().st_size}


def _write_checkpoint(file: ModelFile, spec: ModelSpec, folder: Path) -> None:
    """checkpoint.pth in float32, whose numbers lie in a file while it is made, not in memory."""
    torch = importlib.import_module("torch")
    names = dict(weights_of(spec))
    parts = {ref: part_of(file, ref) for ref in names.values()}
    n_numbers = sum(int(np.prod(part.shape)) for part in parts.values())
    numbers = folder / "numbers"
    storage = torch.from_file(str(numbers), shared=True, size=n_numbers, dtype=torch.float32)
    tensors, at = {}, 0
    for ref, part in parts.items():
        n = int(np.prod(part.shape))
        tensors[ref] = storage[at : at + n].view(part.shape)
        flat = storage[at : at + n].numpy()
        if len(part.shape) == 1:
            flat[:] = dequantize(part.type, part.data, part.shape)
        else:
            for first, last, piece in part.pieces():
                rows = dequantize(part.type, piece, (last - first, part.shape[1]))
                flat[first * part.shape[1] : last * part.shape[1]] = rows.reshape(-1)
        at += n
    torch.save({name: tensors[ref] for name, ref in names.items()}, folder / "checkpoint.pth")
    del tensors, storage
    numbers.unlink()


def _run(question: dict[str, Any]) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    # In this order: the runtime, then the operators that its programs call.
    runtime = importlib.import_module("executorch.extension.pybindings.portable_lib")
    importlib.import_module("executorch.extension.llm.custom_ops.custom_ops")
    importlib.import_module("executorch.kernels.quantized")
    folder = Path(question["folder"])
    program = runtime._load_for_executorch(str(folder / "model.pte"))
    rows, given, at = [], question["prompt"], 0
    for token in question["tokens"]:
        inputs = torch.tensor([given], dtype=torch.long), torch.tensor([at], dtype=torch.long)
        rows.append(program.forward(inputs)[0].float().reshape(-1).numpy().copy())
        at += len(given)
        given = [token]
    np.save(question["logits"], np.stack(rows).astype(np.float32))
    del program
    tokenizer = importlib.import_module("pytorch_tokenizers").get_tokenizer(str(folder / "tokenizer.json"))
    ids = [[int(id) for id in tokenizer.encode(text, bos=False, eos=False)] for text in question["texts"]]
    return {"answer": _generate(folder, question), "ids": ids}


def _generate(folder: Path, question: dict[str, Any]) -> str | None:
    """What the runner makes of the text of the prompt by itself, with its own tokenizer.

    None where a token is a part of a character: the runner's Python interface cannot give that.
    """
    runners = importlib.import_module("executorch.extension.llm.runner")
    runner = runners.TextLLMRunner(str(folder / "model.pte"), str(folder / "tokenizer.json"))
    config = runners.GenerationConfig(echo=False, max_new_tokens=len(question["tokens"]), temperature=0.0)
    pieces: list[str] = []
    try:
        runner.generate(question["text"], config, pieces.append)
    except UnicodeDecodeError:
        return None
    return "".join(pieces)
