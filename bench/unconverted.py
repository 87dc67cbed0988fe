"""The verb calibrate, until it is an experiment."""


def main(words: list[str]) -> int:
    """Run ``steadymoe calibrate`` and return its exit code."""
    from steadymoe.bench.calibration import request as calibration

    return calibration.answer(words[1:])
