"""A plugin for vLLM: ``vllm serve FOLDER`` takes what ``siamesenorm export --to hf`` wrote.

vLLM finds it by the entry point ``vllm.general_plugins`` and calls `register` in every process that it starts.
"""


def register() -> None:
    """Make our configuration and our model known to vLLM; calling it again changes nothing."""
    from vllm import ModelRegistry

    import siamesenorm.interop.huggingface  # noqa: F401  # registers the configuration with AutoConfig

    ModelRegistry.register_model(
        "SiameseNormForCausalLM", "siamesenorm.interop.vllm.model:SiameseNormForCausalLM"
    )  # by name: vLLM imports it in a process of its own, where no device has been touched
