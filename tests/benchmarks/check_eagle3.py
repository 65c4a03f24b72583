"""An EAGLE-3 head of random weights in the shape of a real one, against llama.cpp's converter: all tensors and keys.

    python tests/benchmarks/check_eagle3.py TARGET.gguf LLAMA_CPP [--drafted 32000] [--keep HEAD.gguf]

TARGET.gguf: a model, whose sizes the head has.  LLAMA_CPP: as in tests/support/converter_hashes.py.
--keep: exports the head too, and checks it beside its target. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from check_converter import compare
from checkpoints import write_safetensors
from eagle3_hashes import converted

from edgeinfer.exporters.source import open_source
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.gguf import ModelFile


def write_head(folder: Path, spec: ModelSpec, n_drafted: int) -> None:
    """Write a head for a model: config.json, and small random weights in F16."""
    mixer, ffn, rng = spec.layers[0].mixer, spec.layers[0].ffn, np.random.default_rng(5)
    config = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": n_drafted},
        **{"hidden_size": spec.n_embd, "intermediate_size": ffn.n_ff, "num_attention_heads": mixer.n_heads},
        **{"num_key_value_heads": mixer.n_kv_heads, "num_hidden_layers": 1, "vocab_size": spec.n_vocab},
        **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0},
    }
    d, layer = spec.n_embd, "midlayer."
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{layer}self_attn.{name}_proj.weight": (n, 2 * d) for name, n in (("q", mixer.n_q), ("k", mixer.n_kv))},
        **{f"{layer}self_attn.v_proj.weight": (mixer.n_kv, 2 * d), f"{layer}self_attn.o_proj.weight": (d, mixer.n_q)},
        **{f"{layer}mlp.{name}_proj.weight": (ffn.n_ff, d) for name in ("gate", "up")},
        **{f"{layer}mlp.down_proj.weight": (d, ffn.n_ff), "fc.weight": (d, 3 * d), "lm_head.weight": (n_drafted, d)},
        **{f"{layer}{name}.weight": (d,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "norm.weight": (d,),
    }
    tensors: dict[str, tuple[str, Any]] = {}
    for name, shape in shapes.items():
        values = 0.02 * rng.standard_normal(shape, dtype=np.float32) + (len(shape) == 1)
        tensors[name] = "F16", values
    ids = np.sort(rng.permutation(spec.n_vocab)[:n_drafted])
    tensors["d2t"] = "I64", ids - np.arange(n_drafted)
    tensors["t2d"] = "BOOL", np.isin(np.arange(spec.n_vocab), ids)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--drafted", type=int, default=32000)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.llama_cpp), str(arguments.llama_cpp / "gguf-py")]
    logging.disable(logging.WARNING)
    with ModelFile.open(arguments.target) as file:
        spec = read_spec(file)
    with tempfile.TemporaryDirectory() as name:
        head, target, theirs = (Path(name) / each for each in ("head", "target", "theirs.gguf"))
        write_head(head, spec, arguments.drafted)
        sizes = {"vocab_size": spec.n_vocab, "num_hidden_layers": spec.n_layers, "hidden_size": spec.n_embd}
        target.mkdir()
        (target / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
        converted(head, target, theirs)
        with open_source(head, arguments.target) as source, ModelFile.open(theirs) as file:
            result = compare(source, file)
        if arguments.keep is not None:
            made = [
                "export",
                head,
                "--to",
                "gguf",
                "--target",
                arguments.target,
                "--type",
                "Q8_0",
                "-o",
                arguments.keep,
            ]
            subprocess.run([sys.executable, "-m", "edgeinfer", *map(str, made)], check=True)
    print(json.dumps({"benchmark": "check_eagle3", "target": arguments.target.name, **result}))


if __name__ == "__main__":
    main()
