"""`make demo`: builds the demo model, packs it, and answers a prompt within a third of the experts' bytes."""

import argparse
import subprocess
import sys
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent / "models"
PROMPT = "Explain in a few sentences why the sky is blue."


def lean(*arguments: str) -> None:
    """Runs the lean command as a user would, showing it first."""
    print("\n$ lean", " ".join(f'"{a}"' if " " in a else a for a in arguments), flush=True)
    command = [str(Path(sys.executable).parent / "lean"), *arguments]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", default="128")
    options = parser.parse_args()
    gguf, pack = MODELS / "demo.gguf", MODELS / "demo.lmpack"
    if not pack.exists():
        subprocess.run(
            [sys.executable, str(Path(__file__).parent / "build_model.py"), "--out", str(gguf)], check=True
        )
        lean("pack", str(gguf), str(pack))
    experts = sum(file.stat().st_size for file in pack.glob("experts/*/*"))
    budget = f"{experts // 3 >> 20}MiB"
    lean("info", str(pack))
    lean("plan", str(pack), "--memory", budget)
    lean(
        *(
            "run",
            str(pack),
            "--memory",
            budget,
            "--max-tokens",
            options.max_tokens,
            "--temperature",
            "0",
            "--stats",
        ),
        *("-p", options.prompt),
    )


if __name__ == "__main__":
    main()
