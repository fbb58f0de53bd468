"""What an import costs: commands that need no torch do not import it, and the names of the package are all there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import halfsilver as hs
from halfsilver.cli import names
from halfsilver.overlap.text import MIN_WORDS
from halfsilver.study.method import NAMES, REGISTERED

WITHOUT_TORCH = {
    "import": "import halfsilver",
    "plan": "from halfsilver import PrivacyPlan; PrivacyPlan.calibrate",
    "help": "from halfsilver.__main__ import main; sys.argv = ['halfsilver', '--help']; main()",
    "help of a command": "from halfsilver.__main__ import main; sys.argv = ['halfsilver', 'compare', '--help']; main()",
    "an error": "from halfsilver.__main__ import main; sys.argv = ['halfsilver', 'nonsense']; main()",
}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_without_torch(name: str) -> None:
    code = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); {WITHOUT_TORCH[name]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.nightly
def test_epsilon_without_torch() -> None:
    """And the check can fail: a trainer needs torch."""
    asked = ["--noise-multiplier", "4", "--sampling-rate", "0.1", "--steps", "5", "--delta", "1e-5", "--json"]
    code = f"from halfsilver.__main__ import main; sys.argv = ['halfsilver', 'epsilon', *{asked}]; main()"
    for last, expected in ((code, "False"), ("import halfsilver; halfsilver.Trainer", "True")):
        whole = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); {last}"
        done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=120)
        assert done.stdout.splitlines()[-1] == expected, done.stderr


WITHOUT_ACCOUNTING = {
    "a trainer": "import halfsilver; halfsilver.Trainer, halfsilver.PrivateData, halfsilver.compare",
    "a device": "import halfsilver.federated.flower",
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WITHOUT_ACCOUNTING)
def test_without_accounting(name: str) -> None:
    """dp-accounting brings SciPy, and takes about as long as torch. And the check can fail: an epsilon needs both."""
    plan = "halfsilver.PrivacyPlan(steps=2, sampling_rate=0.1, noise_multiplier=4.0, expected_batch_size=8)"
    epsilon = f"import halfsilver; {plan}.epsilon(1e-5)"
    for code, expected in ((WITHOUT_ACCOUNTING[name], "False False"), (epsilon, "True True")):
        whole = f"import sys; {code}; print(*(name in sys.modules for name in ('dp_accounting', 'scipy')))"
        done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == expected, done.stderr


def test_every_name_has_a_home() -> None:
    assert sorted(hs._HOME) == sorted(hs.__all__)
    for name in (*hs.__all__, *hs._MODULES):
        assert getattr(hs, name) is getattr(hs, name)
        assert name in dir(hs)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hs.nonsense  # type: ignore[attr-defined]


def test_the_function_stays_a_function_beside_the_deprecated_path() -> None:
    import halfsilver.audit  # noqa: F401 - sets the attribute of the package where it is imported first

    assert callable(hs.audit)


def test_help_texts_have_the_names_of_the_library() -> None:
    assert names.METHODS == NAMES
    assert tuple(REGISTERED) == names.ALL_METHODS
    assert names.MIN_WORDS == MIN_WORDS
