"""The text with which passes of models with experts are timed: random tokens need another number of experts."""

from __future__ import annotations

from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

TEXT = '''\
The harbour was quiet when the ferry came in. A few people waited on the quay with bicycles and bags, and a dog slept \
in the sun beside the ticket office. Nobody was in a hurry: the next boat would leave in the afternoon, and the shops \
in the old town were closed until two. In the kitchen behind the bakery somebody was singing, and it smelled of bread.

The largest rivers of the region are fed by snow. In spring, when it melts, the water rises by several metres, and the \
bridges in the valley are closed for some days. Since 1997 a dam above the town keeps most of it back.

def moving_average(values, n):
    """The mean of each n values in a row."""
    total = sum(values[:n])
    means = [total / n]
    for old, new in zip(values, values[n:]):
        total += new - old
        means.append(total / n)
    return means


class Queue:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop(0) if self.items else None

To install the program, download the archive, open it, and follow these steps:
1. Copy the folder to a place of your choice.
2. Open a terminal and change to that folder.
3. Run the script with the name of your file, for example `convert report.txt`.
If something goes wrong, the last line of the output says why. Most errors come from a file that cannot be read.
'''


def calibration_tokens(file: ModelFile) -> list[int]:
    """Some hundred tokens of prose and code, by the tokenizer of a model."""
    return Tokenizer.from_file(file).encode(TEXT, add_special=False)
