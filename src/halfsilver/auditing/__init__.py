"""Attacks on the library's own mechanism: `hs.audit` for a user's trainer, `loops` for every loop of the library.

Canaries are records whose gradients point along single numbers of a bank beside the model (`bank`). An observer records
what happens to them (`watch`, `run`), and instruments (`instruments`) test these records (`observe`) against the plan.

References:
    - Jagielski, Ullman and Oprea 2020, Auditing Differentially Private Machine Learning: How Private is Private SGD?,
      arXiv:2006.07709.
    - Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning, arXiv:2302.07956.
    - Steinke, Nasr and Jagielski 2023, Privacy Auditing with One (1) Training Run, arXiv:2305.08846.
"""

from halfsilver.auditing.instruments import Finding, judge, lower_bound
from halfsilver.auditing.observe import Kind, Observation, Replay
from halfsilver.auditing.report import NOT_PROVED, AuditReport, audit

__all__ = ["NOT_PROVED", "AuditReport", "Finding", "Kind", "Observation", "Replay", "audit", "judge", "lower_bound"]
