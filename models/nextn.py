"""The blocks of a model file that draft: multi-token prediction (DeepSeek-V3, arXiv:2412.19437), `nextn.*` in GGUF.

Nothing here drafts. A model's own text does not depend on them, and `read_spec` does not look at their shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgeinfer.models.spec import Layer, TensorRef, Weight, weights_of

# Tensors after "blk.<index>.nextn.", by role.
REQUIRED = {"projection": "eh_proj.weight", "token_norm": "enorm.weight", "hidden_norm": "hnorm.weight"}
OWN = {  # in place of those of the model, where there are some
    "output_norm": "shared_head_norm.weight",
    "token_embd": "embed_tokens.weight",
    "output": "shared_head_head.weight",
}


@dataclass(frozen=True)
class NextnBlock:
    """A block behind the layers of a model. With the token at position p and the hidden row y of position p - 1:

        u = projection @ [norm(token_embd[token], token_norm), norm(y, hidden_norm)]
        u goes through the layer, whose keys and values are its own
        y of p = norm(u, output_norm), of u less its mean if centred_output;  logits of p + 1 = output @ y

    The hidden rows that it begins with are those of the model behind its own output norm.
    """

    index: int  # of the block in the file
    n_embd: int
    n_vocab: int
    layer: Layer
    projection: str  # (n_embd, 2 n_embd)
    token_norm: str  # (n_embd,)
    hidden_norm: str  # (n_embd,)
    # output_norm, token_embd, output: its own, or the model's
    output_norm: str
    token_embd: str
    output: TensorRef
    centred_output: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor beside those of the layer, by role."""
        return {
            "projection": (self.n_embd, 2 * self.n_embd),
            "token_norm": (self.n_embd,),
            "hidden_norm": (self.n_embd,),
            "output_norm": (self.n_embd,),
            "token_embd": (self.n_vocab, self.n_embd),
            "output": (self.n_vocab, self.n_embd),
        }

    def weights(self) -> Iterator[Weight]:
        """Every tensor, those of the model that it reads too. Blocks: "nextn", "nextn.mixer", "nextn.ffn"."""
        yield from weights_of("nextn", self)
        yield from weights_of("nextn.mixer", self.layer.mixer)
        yield from weights_of("nextn.ffn", self.layer.ffn)
