#!/usr/bin/env python
"""Draw over a picture with a LoRA at three scales: python examples/img2img_lora.py    (needs: pip install peft)

The LoRA is random, to see what a scale does. Yours: pipe.load_lora_weights("style.safetensors", adapter_name="style").
"""

from peft import LoraConfig

import rocm_sd

usual = {"num_inference_steps": 20, "guidance_scale": 3.0}
first = rocm_sd.ROCmStableDiffusionPipeline.from_pretrained("emoji-sd")("a frog", **usual).images[0]
pipe = rocm_sd.ROCmStableDiffusionImg2ImgPipeline.from_pretrained("emoji-sd")
pipe.unet.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"]), "style")
for scale in (0.0, 0.5, 1.0):
    pipe.set_adapters("style", scale)
    pipe("a frog on a blue background", image=first, strength=0.8, **usual).images[0].save(f"lora-{scale}.png")
pipe.unload_lora_weights()  # and it draws as before
