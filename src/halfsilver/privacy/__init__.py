"""The only code that sees private data. To audit it, read the files in this order:

1. ``plan.py`` and ``accounting.py``: what is promised, and how epsilon follows from it.
2. ``mechanism.py``: one release. In it ``batches.py`` draws and reads, ``passes.py`` clips and sums, and
   ``releases.py`` writes the ledger before and adds the noise after.
3. ``sampling.py``, ``noise.py``, ``entropy.py``: the sampler, the noise, and where random bits come from.
4. ``ledger/``: ``records.py`` (format), ``history.py`` (checks), ``budget.py`` (filter), ``ledger.py`` (append).
5. ``data.py``, ``schema.py``, ``silence.py``: how a record is read, and what happens if it cannot be.
6. ``gradients/base.py``: clipping, its margin, and the contract of backends; then ``gradients/vmap.py``, the simplest
   backend, and ``gradients/probe.py``, which checks the others against it on made-up rows.
7. ``gradients/book/``: the fast kernels, each held to the contract in ``gradients/book/example_gradients.py``.
8. ``users/``: ``source.py``, ``fold.py``, ``engine.py``: the same release with users in place of examples.
9. ``released_metrics.py``: metrics with noise, by the release of ``mechanism.py``; ``clip_norm.py`` builds on it.
10. ``copies.py``, ``recognise.py``, ``count.py``, ``arrays.py``: helpers. ``metrics.py`` is outside the guarantee.
"""
