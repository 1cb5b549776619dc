"""SGLang's real scheduler on a CPU without AVX512: its environment, and the kernels that it lacks there."""
