"""Qwen3-Next 80B-A3B (Qwen team 2025): as qwen35moe, but value heads that share a key head are neighbours.

Its files have one matrix for b and a. Older ones, whose recurrent layers have one matrix `ssm_in` for queries, keys,
values and gates, are refused: convert the checkpoint again.
"""

from dataclasses import replace

from edgeinfer.models.architectures import qwen35, qwen35moe

ARCHITECTURE = replace(qwen35moe.ARCHITECTURE, name="qwen3next", recurrence=qwen35.grouped_delta_net)
