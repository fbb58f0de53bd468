"""All who take part, by name. A contender that cannot run a model, or is not installed, is reported as skipped."""

from __future__ import annotations

from benchmarks.speed.contenders import ours, plain, with_jax, with_opacus
from benchmarks.speed.contenders.base import Contender, Entry, Named, Options
from benchmarks.speed.contenders.with_vmap import VmapGrad
from benchmarks.speed.networks import LoopLSTM

__all__ = ["BASE", "CONTENDERS", "Contender", "Entry", "Named", "Options"]

BASE = "plain"

CONTENDERS: dict[str, Entry] = {
    BASE: Entry(build=plain.whole),
    "plain_micro": Entry(build=plain.micro),
    "halfsilver": Entry(build=ours.Ours),
    "halfsilver_pda": Entry(build=ours.OursMirror, pda=True),
    "vmap": Entry(build=VmapGrad, recurrent=lambda: LoopLSTM),
    **with_opacus.ENTRIES,
    "jax_privacy": Entry(build=with_jax.JaxPrivacy, prepare=with_jax.prepare),
}
