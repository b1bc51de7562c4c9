"""Sample pictures inside the page: given as files, or drawn by stock and rocm-sd side by side."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, UnidentifiedImageError

from rocm_sd.bench.report.parts import Picture, Section
from rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["PROMPTS", "UnreadablePicture", "draw", "pictures", "read"]

LARGEST = 768  # pixels a side: more is not seen on the page, and every byte of it is in the file
PROMPTS = 3
STEPS = 20


class UnreadablePicture(RocmSdError):
    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is not a picture: {why}.", hint="Give a PNG file, as rocm-sd generate writes.")


def read(path: Path) -> Picture:
    """The pixels, and of the text in the file only the prompt: nothing else that it holds is published."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            image.load()
            prompt = image.info.get("prompt")
            return _picture(image, str(prompt) if prompt else path.stem)
    except FileNotFoundError:
        raise UnreadablePicture(path, "there is no such file") from None
    except UnidentifiedImageError:
        raise UnreadablePicture(path, "it is not a PNG file") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnreadablePicture(path, str(error)) from error


def _picture(image: Image.Image, caption: str) -> Picture:
    plain = image.convert("RGB")
    plain.thumbnail((LARGEST, LARGEST))
    # A copy has no text chunks.
    plain = Image.fromarray(np.asarray(plain))
    stream = io.BytesIO()
    plain.save(stream, format="PNG", optimize=True)
    data = base64.b64encode(stream.getvalue()).decode("ascii")
    return Picture(f"data:image/png;base64,{data}", caption, plain.width, plain.height)


def draw(on_picture: Callable[[str, int], None]) -> tuple[tuple[Picture, ...], ...]:
    """Three prompts of the built-in model on the CPU, by stock and by rocm-sd, from the same noise."""
    from rocm_sd import models  # noqa: PLC0415 -- Diffusers is loaded only when something is drawn
    from rocm_sd.engine import optimize, restore  # noqa: PLC0415
    from rocm_sd.integrations import diffusers as host  # noqa: PLC0415
    from rocm_sd.integrations.diffusers.loading import default_device, hush  # noqa: PLC0415
    from rocm_sd.models.emoji import DEMO_PROMPTS  # noqa: PLC0415

    hush()
    source = models.resolve()
    pipe = host.load_pipeline(source, default_device("cpu"))
    rows = []
    for prompt in DEMO_PROMPTS[:PROMPTS]:
        request = host.Request(prompt, steps=STEPS, seed=0, guidance=source.guidance)
        drawn = []
        for engine, prepare in (("stock", restore), ("rocm-sd", optimize)):
            prepare(pipe)
            drawn.append(host.generate(pipe, request).images[0])
            on_picture(f"{engine}: {prompt}", 2 * PROMPTS)
        stock, ours = drawn
        largest = int(np.abs(np.asarray(stock, np.int16) - np.asarray(ours, np.int16)).max())
        rows.append(
            (
                _picture(stock, f"stock: {prompt}"),
                _picture(ours, f"rocm-sd: {prompt} (largest difference {largest} of 255)"),
            )
        )
    restore(pipe)
    return tuple(rows)


def pictures(given: Sequence[Picture], drawn: Sequence[tuple[Picture, ...]]) -> Section:
    title = "Pictures"
    if not given and not drawn:
        return Section("pictures", title, missing="No pictures were given. Type: rocm-sd report ... --draw")
    lead = (
        "The same prompt, noise and steps by stock Diffusers and by rocm-sd. The largest difference of any value "
        "stands under each pair."
        if drawn
        else ""
    )
    commands = ("rocm-sd report --draw", "rocm-sd demo") if drawn else ()
    rows = (*drawn, *((picture,) for picture in given))
    return Section("pictures", title, lead, pictures=rows, commands=commands)
