"""A process of its own in which math-verify compares answers; `reward_math` starts it by its path.

One JSON object per line: {"answer", "label"} comes in, {"equal"} goes out, or {"bad_label": true}.
Symbolic mathematics may take forever inside one C call, where no Python handler runs: here the
kernel ends the process after the time limit, which is the first argument [s].
"""

import json
import logging
import os
import resource
import signal
import sys

START_SECONDS = 300.0
# A power such as 10^(10^10) would otherwise fill the machine's memory.
MEMORY_BYTES = 4 << 30


def main(limit_seconds: float) -> None:
    """Answers until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # libraries print to standard output now and then
    os.dup2(2, 1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from math_verify import LatexExtractionConfig, parse, verify

    # "no timeout" is what they warn of
    logging.disable()

    def parsed(text: str) -> list[object]:
        boxed = f"\\boxed{{{text}}}"
        return parse(boxed, [LatexExtractionConfig()], parsing_timeout=None)

    def tell(answer: dict[str, bool]) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    # the first comparison loads what the others need
    verify(parsed("\\frac{1}{2}"), parsed("0.5"), timeout_seconds=None)
    tell({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_seconds)
        label = parsed(asked["label"])
        if not label:
            tell({"bad_label": True})
            continue
        tell({"equal": verify(label, parsed(asked["answer"]), timeout_seconds=None)})


if __name__ == "__main__":
    main(float(sys.argv[1]))
