"""Pictures of the page, taken of a real cluster while it prefills a long prompt.

    python -m tests.browser.screenshot [FOLDER]

Writes page.png and page-dark.png to FOLDER (deploy/). Takes minutes: a router, a PP2 prefill group and a decode node
answer some prompts of different lengths with SmolLM2-135M first.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

from headwater.client import AsyncClient, prompt_request
from headwater.cluster import Cluster
from tests.browser.chrome import Page, installed, open_page
from tests.harness import Group, model_folder, processes, until_paired, write_cluster

CHUNK_TOKENS = 256
# Of the prompts before, in order, and of the one in the picture.
EARLIER_TOKENS = (300, 900, 512, 120, 1400, 700, 256, 1100, 450, 820)
LONG_TOKENS = 6000
# Of the long one, at least, when the picture is taken.
CHUNKS_DONE = 12
WIDTH, HEIGHT = 1280, 966
DEPLOY = Path(__file__).parents[2] / "deploy"


def numbers(count: int) -> list[int]:
    """Token ids that make a prompt of that length."""
    return random.Random(count).choices(range(100, 1000), k=count)


async def take(cluster: Cluster, page: Page, folder: Path) -> None:
    await asyncio.to_thread(page.set_screen, WIDTH, HEIGHT)
    await until_paired(cluster.router.address, "p0")
    async with AsyncClient(cluster.router.address) as client:
        first, second = EARLIER_TOKENS[::2], EARLIER_TOKENS[1::2]
        for some in zip(first, second, strict=True):
            # Two at a time, so that there is a queue to be seen.
            await asyncio.gather(*(client.complete(numbers(count), 12) for count in some))
        request = prompt_request(numbers(LONG_TOKENS), 24, request_id="long-prompt")
        async for response in client.generate(request):
            if response.progress.tokens_done == CHUNK_TOKENS:
                await asyncio.to_thread(page.driver.get, f"http://{(await client.status()).page_address}/")
            if response.progress.tokens_done >= CHUNKS_DONE * CHUNK_TOKENS:
                await asyncio.to_thread(photograph, page, folder)
                break


def photograph(page: Page, folder: Path) -> None:
    page.until(lambda: len(page.all(".trace rect.own")) > CHUNKS_DONE, "a timeline")
    for dark, name in ((False, "page.png"), (True, "page-dark.png")):
        page.set_screen(WIDTH, HEIGHT, dark=dark)
        page.save(folder / name)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEPLOY
    browser = installed()
    options = (("chunk_tokens", CHUNK_TOKENS), ("pool_tokens", 16384), ("cores", [0, 1]))
    with tempfile.TemporaryDirectory(prefix="headwater-") as work:
        path = Path(work) / "cluster.toml"
        cluster = write_cluster(path, model_folder(), [Group("p0", 2, 1, options)])
        with processes(cluster, path, ["router", "p0", "d0"], Path(work)), open_page(*browser) as page:
            asyncio.run(take(cluster, page, folder))


if __name__ == "__main__":
    main()
