"""Run `vllm serve`, also for the CPU build, whose package has another name than the one that vLLM asks for its version."""

from importlib import metadata

ASKED = metadata.version


def version(name: str) -> str:
    try:
        return ASKED(name)
    except metadata.PackageNotFoundError:
        return "0.32.0+cpu" if name == "vllm" else ASKED(name)


metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
