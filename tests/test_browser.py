"""JupyterLab in a real browser: notebook 03 is run from the menu, its damping slider moved, its picture watched.

    python -m pytest -m browser

It needs JupyterLab, Playwright (the package alone, no download of browsers) and a Chromium: apt-get install chromium.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight stay in the page
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},  # no question over the page
}
ERRORS = "[data-mime-type='application/vnd.jupyter.error'], [data-mime-type='application/vnd.jupyter.stderr']"
RUN = """() => {
  const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
  return prompts.length > 9 && /\\d/.test(prompts.at(-1).textContent) || document.querySelector("ERRORS");
}""".replace("ERRORS", ERRORS)
PICTURE = """async () => {
  const bytes = await (await fetch(document.querySelector('img.widget-image').src)).arrayBuffer();
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
  return `${bytes.byteLength} ${digest}`;
}"""


@pytest.fixture
def chromium():
    """The path of a Chromium; skipped, with the remedy, where something is missing."""
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: pip install jupyterlab")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return found or pytest.skip("no Chromium on the PATH: apt-get install chromium")


@pytest.fixture
def lab(tmp_path, chromium):
    """The address of a JupyterLab over a copy of the notebooks, with settings, token and kernels of its own."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns(".*"))
    for name, settings in SETTINGS.items():
        path = tmp_path / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    own = {"CONFIG": "config", "RUNTIME": "runtime", "DATA": "data"}
    env = {**os.environ, **{f"JUPYTER_{name}_DIR": str(tmp_path / folder) for name, folder in own.items()}}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"), "IPYTHONDIR": str(tmp_path / "ipython")}
    env["PYTHONPATH"] = str(ROOT)  # the kernel imports this checkout
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1"]
    command += [f"--ServerApp.root_dir={tmp_path / 'notebooks'}", "--IdentityProvider.token=a-token"]
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        yield _address(server, tmp_path)
    finally:
        server.terminate()  # it ends its kernels
        server.wait(30)


def _address(server, folder, seconds=60):
    """The server says where it listens in a file of its runtime folder, once it does."""
    for _ in range(seconds * 5):
        for info in (folder / "runtime").glob("jpserver-*.json"):
            return json.loads(info.read_text())["url"]
        assert server.poll() is None, (folder / "server.log").read_text()
        time.sleep(0.2)
    raise AssertionError((folder / "server.log").read_text())


@pytest.fixture
def page(lab, chromium):  # after the server, so that it is closed before it
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        yield page
        (ROOT / ".browser").mkdir(exist_ok=True)
        page.screenshot(path=ROOT / ".browser" / "03_irls.png")  # after a failure too
        browser.close()


def test_the_damping_slider_redraws_its_picture_in_jupyterlab(lab, page):
    page.goto(f"{lab}doc/tree/03_irls.ipynb?token=a-token", timeout=90_000)
    page.get_by_text("(ipykernel) | Idle").wait_for(timeout=90_000)  # before, the menu's command does nothing
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(RUN, timeout=240_000, polling=500)  # not at every frame
    assert page.locator(ERRORS).all_inner_texts() == []

    slider = page.locator(".widget-hslider", has_text="constant C")
    pictures = page.locator(".jp-OutputArea-output img").count()
    before = page.evaluate(PICTURE)
    assert "50" in slider.inner_text()
    slider.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    deadline = time.monotonic() + 60
    while page.evaluate(PICTURE) == before:
        assert time.monotonic() < deadline, "the picture stays the same"
        page.wait_for_timeout(200)
    assert "100" in slider.inner_text()

    slider.scroll_into_view_if_needed()
    assert page.locator(".jp-OutputArea-output img").count() == pictures  # replaced, not stacked
    assert page.locator(ERRORS).all_inner_texts() == []
    assert "nats per draft" in page.locator(".widget-html", has_text="excess log-loss").inner_text()
