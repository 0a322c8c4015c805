"""Turn a GGUF file into a folder that vLLM serves: safetensors in bfloat16, tokenizer and chat template.

convert.py GGUF FOLDER        (runs in the vLLM environment)
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

gguf, folder = Path(sys.argv[1]), Path(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
if not tokenizer.chat_template:
    sys.exit(f"{gguf} has no chat template")
model = AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
for file in folder.iterdir():
    file.chmod(0o644)
