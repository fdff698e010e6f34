"""The build backend that pyproject.toml names: setuptools', or one sentence where there is none."""

try:
    from setuptools.build_meta import *  # noqa: F403
except ModuleNotFoundError:
    raise SystemExit(
        "ocnn-fused is built with setuptools, which is not installed: run `pip install 'setuptools>=77.0.3'` first"
    ) from None
