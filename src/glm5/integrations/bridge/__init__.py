"""The parts of the Megatron-Bridge plug-in; `glm5.integrations.megatron_bridge` puts them in."""
