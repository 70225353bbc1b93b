"""Conformance suites for attacks, defenses, methods and protocols, shipped for authors of plug-ins.

Subclass a suite in a test file, name the subclass ``Test...``, and pytest runs every check on what ``make`` returns:

    from vflsec.testing.conformance import AttackConformance, DefenseConformance

    class TestMyDefense(DefenseConformance):
        def make(self, strength, **options):
            return MyDefense(strength, **options)

    class TestMyAttack(AttackConformance):
        def make(self):
            return MyAttack(epochs=20)

Attacks on integrity use ``IntegrityConformance``, those on recordings of an encrypted layer ``RecordingConformance``.

``exempt`` names checks that do not apply, with the reason, which pytest shows for the skipped test:

    class TestSignOnly(DefenseConformance):
        exempt = {"test_noise_is_fresh_at_each_release": "keeps the sign of each entry; nothing is random"}

No suite imports pytest. All use fixed seeds, and random quantities are compared with a bound of four standard errors.
"""

from vflsec.testing.suite_attack import AttackConformance, IntegrityConformance, RecordingConformance
from vflsec.testing.suite_defense import DefenseConformance
from vflsec.testing.suite_method import MethodConformance, ProtocolConformance

__all__ = [
    "AttackConformance",
    "DefenseConformance",
    "IntegrityConformance",
    "MethodConformance",
    "ProtocolConformance",
    "RecordingConformance",
]
