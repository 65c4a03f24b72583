"""`python -m edgeinfer.hls.synth`: counts the engines and the baselines, and prints the table."""

from __future__ import annotations

import sys

import click

from edgeinfer.common.errors import EdgeInferError
from edgeinfer.hls.synth.counts import count
from edgeinfer.hls.synth.designs import Design, designs
from edgeinfer.hls.synth.fmax import record_fmax
from edgeinfer.hls.synth.resources import counted, record, recorded, table


@click.command()
@click.option("--engine", "names", multiple=True, type=click.Choice(list(designs())), help="This design alone.")
@click.option("--recorded", "is_recorded", is_flag=True, help="The table of resources.json; nothing is counted.")
@click.option("--write", is_flag=True, help="Write the counts into resources.json.")
@click.option("--parts", is_flag=True, help="What each kept module of a design takes.")
@click.option("--route", is_flag=True, help="Route on an ECP5 instead, and write fmax.json; some minutes an engine.")
def main(names: tuple[str, ...], is_recorded: bool, write: bool, parts: bool, route: bool) -> None:
    """Logic estimates of the engines and of the baselines with adders, by yosys."""
    chosen = [designs()[name] for name in names or designs()]
    try:
        if route:
            record_fmax(chosen)
        elif parts:
            _print_parts(chosen)
        else:
            _print_counts(chosen, is_recorded, write)
    except EdgeInferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _print_counts(chosen: list[Design], is_recorded: bool, write: bool) -> None:
    if is_recorded:
        print(table(recorded()))
    elif write:
        for design in chosen:
            record(counted([design]))
        print(table(recorded()))
    else:
        print(table(counted(chosen)))


def _print_parts(chosen: list[Design]) -> None:
    for design in chosen:
        for name, part in sorted(count(design, flat=False)[1].items(), key=lambda each: -each[1].luts):
            print(f"{design.name}  {part.luts:6} LUT {part.ff:6} FF  {name}")


if __name__ == "__main__":
    main()
