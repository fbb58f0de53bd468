"""Attacks on the library's own mechanism: `hs.audit` for a user's trainer, `loops` for all of the library's.

Canaries stand in a bank beside the model (`bank`), an onlooker notes what happens to them (`watch`, `run`), and
instruments (`instruments`) hold the notes (`observe`) against the plan.
"""

from halfsilver.auditing.instruments import Finding, judge, lower_bound
from halfsilver.auditing.observe import Kind, Observation, Replay
from halfsilver.auditing.report import NOT_PROVED, AuditReport, audit

__all__ = ["NOT_PROVED", "AuditReport", "Finding", "Kind", "Observation", "Replay", "audit", "judge", "lower_bound"]
