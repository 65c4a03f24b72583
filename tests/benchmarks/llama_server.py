"""`edgeinfer serve`, told with llama-server's flags; see judge_llama_suite.py, whose tests start it for each case.

So it imports nothing that takes long. EDGEINFER_JUDGE_MODEL and EDGEINFER_JUDGE_FILL_IN_MODEL name the models;
EDGEINFER_JUDGE_BANNED has ids of tokens that are never drawn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

MODEL, FILL_IN, BANNED = "EDGEINFER_JUDGE_MODEL", "EDGEINFER_JUDGE_FILL_IN_MODEL", "EDGEINFER_JUDGE_BANNED"
_SAME = {"--port", "--host", "--temp", "--seed", "--n-predict", "--chat-template", "--chat-template-file", "--tags"}
_OTHERWISE = {"--batch-size": "-ub", "--ubatch-size": "-ub", "--cors-origins": "--cors-origin"}
_NO_USE = {"--hf-file", "--model", "--model-url", "--threads", "--n-gpu-layers", "-fa", "-ctk", "-ctv"}  # with a value
_NO_USE |= {"--grp-attn-n", "--grp-attn-w", "--reasoning-format", "--cache-ram"}
_WITHOUT_VALUE = {"--offline", "--cont-batching", "--metrics", "--kv-unified", "--swa-full", "--jinja", "--no-jinja"}
_WITHOUT_VALUE |= {"--no-cache-idle-slots", "--backend_sampling"}
_SAME_WITHOUT_VALUE = {"--slots", "--no-slots", "--no-ui", "--verbose"}


def command_of(arguments: Sequence[str]) -> list[str]:
    """What `edgeinfer serve` is told instead. Raises SystemExit for a flag of something that it lacks."""
    model, found = os.environ[MODEL], []
    sizes: dict[str, int] = {}
    left = iter(arguments)
    for flag in left:
        if flag in _SAME_WITHOUT_VALUE:
            found.append(flag)
        elif flag in _WITHOUT_VALUE:
            pass
        elif flag in _SAME or flag in _OTHERWISE:
            found += [_OTHERWISE.get(flag, flag), next(left)]
        elif flag in ("--ctx-size", "--parallel"):
            sizes[flag] = int(next(left))
        elif flag == "--api-key":
            os.environ["EDGEINFER_API_KEY"] = next(left)
        elif flag == "--alias":
            found += [part for name in next(left).split(",") for part in ("-a", name)]
        elif flag == "--reasoning":  # theirs tells templates enable_thinking=true with auto too
            found += [flag, next(left).replace("auto", "on")]
        elif flag == "--hf-repo":
            if "infill" in next(left):
                model = os.environ.get(FILL_IN) or sys.exit("this test needs --fill-in-model")
        elif flag in _NO_USE:
            next(left)
        else:
            sys.exit(f"edgeinfer serve has nothing like {flag}")
    # Theirs is divided between slots, unless they share one; ours is what each text may have.
    n_parts = 1 if "--kv-unified" in arguments else sizes.get("--parallel", 1)
    found += ["-c", str(sizes["--ctx-size"] // n_parts)] if "--ctx-size" in sizes else []
    found += ["-np", str(sizes["--parallel"])] if "--parallel" in sizes else []
    found += [part for id in os.environ.get(BANNED, "").split() for part in ("-l", f"{id}-inf")]
    return ["serve", "-m", model, "-t", "2", "--drafter", "none", "--any-model", *found]


if __name__ == "__main__":
    if sys.argv[1:] == ["--help"]:
        sys.exit(print(f"usage: llama_server.py FLAGS_OF_LLAMA_SERVER\n\n{__doc__}"))
    os.execv(sys.executable, [sys.executable, "-m", "edgeinfer", *command_of(sys.argv[1:])])
