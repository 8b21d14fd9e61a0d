"""Models of transformers: loaded, adapted, quantized, compiled, sharded, merged, handed on."""
