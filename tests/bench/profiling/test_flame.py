from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from traces import GpuTrace

from rocm_sd.bench.profiling import flame, read


def trace():
    made = GpuTrace((0, 100))
    made.module("unet", 0, 90)
    made.module("unet.mid_block.conv", 5, 40)
    for start in (10, 20):
        made.host("aten::conv2d", start, start + 8)
        made.kernel("igemm_fwd</script><b>", start + 2, start + 3, start + 13)
    made.kernel("attn_fwd", 50, 50, 60, launch="cudaGraphLaunch")
    return read(made.values)


def test_the_tree_is_module_op_kernel_merged_over_calls():
    top = flame.tree(trace(), idle_us=70)
    assert (top.us, top.calls) == (100, 4)
    unet = top.children["unet", "module"]
    conv = unet.children["mid_block.conv", "module"].children["aten::conv2d", "op"]
    (kernel,) = conv.children.values()
    assert (kernel.kind, kernel.us, kernel.calls) == ("kernel", 20, 2)
    assert list(unet.children["replayed graph", "other"].children) == [("attention", "other")]
    assert top.children["idle", "other"].us == 70


def test_what_is_too_narrow_to_draw_is_counted_and_not_dropped():
    top = flame.tree(trace())
    small = top.to_dict(least=15)

    def leaves(node):
        return [node] if not node["c"] else [leaf for child in node["c"] for leaf in leaves(child)]

    assert sum(leaf["t"] for leaf in leaves(small)) == top.us
    assert any(leaf["n"] == "1 smaller" for leaf in leaves(small))


def test_the_page_fetches_nothing_and_no_name_can_end_the_script():
    page = flame.page(trace(), title="a <b> & c", notes=["drawn <eagerly>"])
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page) == []
    assert "a &lt;b&gt; &amp; c" in page
    assert "drawn &lt;eagerly&gt;" in page
    assert "@@" not in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert "igemm_fwd</script><b>" in json.dumps(json.loads(data[1]))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_a_browser_draws_zooms_and_searches(tmp_path):
    page = flame.page(trace(), title="picture")
    script = """<script>
      const press = name => new KeyboardEvent("keydown", {key: name, bubbles: true});
      const key = name => document.activeElement.dispatchEvent(press(name));
      const seen = [chart.querySelectorAll("g").length];
      chart.querySelector('[tabindex="0"]').focus();
      key("ArrowDown"); key("Enter"); seen.push(zoom.n); key("Escape"); seen.push(zoom.n);
      search.value = "attn"; search.dispatchEvent(new Event("input")); seen.push(matches.textContent);
      document.body.innerHTML = "<pre>" + seen.join("|") + "</pre>";
    </script></body>"""
    (tmp_path / "flame.html").write_text(page.replace("</body>", script))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "flame.html").as_uri()],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    shown = re.search(r"<pre>(.*?)</pre>", done.stdout)
    assert shown, done.stderr
    assert shown[1] == "8|unet|all|found: 0.010 ms, 33.3% of all"
