"""Texts that are downloaded: their files, and a download that resumes after interruptions."""
import http.client
import shutil
import time
import urllib.error
import urllib.request

from tqdm import tqdm

from engine.files import publish, sha256
from engine.text.blocks import Unfit

# {source: {file: (bytes, sha256)}}. The TinyStories values were taken from public listings of the
# revision in tinystories_url of data.py. Downloads were tested only against a local test server.
DOWNLOADS = {
    "tinystories": {
        "TinyStoriesV2-GPT4-train.txt":
            (2_227_753_162, "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443"),
        "TinyStoriesV2-GPT4-valid.txt":
            (22_502_601, "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d"),
    },
    "tinyshakespeare": {
        "input.txt":
            (1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    },
}
VALIDATION = "TinyStoriesV2-GPT4-valid.txt"  # becomes the validation split of tinystories
NETWORK = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)
BRIEF = 408, 429  # client errors that are worth a retry: timeout, too many requests
PATIENCE = (1, 2, 4, 8, 16)  # seconds to wait after the first, second, ... failure in a row


def download(path, base_url, size, expected):
    """
    Download base_url/NAME to `path`, whose name is NAME, unless it exists.

    An interrupted download resumes where it stopped, in this call or a later one. size: bytes;
    expected: the sha256. Raises Unfit after too many failures, or if the downloaded or existing
    file has another hash.
    """
    url, part = f"{base_url}/{path.name}", path.with_name(path.name + ".part")
    if path.exists():
        check_hash(path, path, path.stat().st_size, size, expected,
                   "move it elsewhere, and the same command downloads it")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    have = furthest = part.stat().st_size
    if shutil.disk_usage(path.parent).free < size - have:
        raise Unfit(f"{path.parent}: too little disk space for {path.name}, "
                    f"{(size - have) / 1e9:.1f} GB more needed")
    failures = 0
    with tqdm(total=size, initial=have, desc=path.name, unit="B", unit_scale=True,
              dynamic_ncols=True) as bar:
        while have < size:
            problem, permanent = "connection closed", False
            try:
                fetch(url, part, size, bar)
            except urllib.error.HTTPError as e:
                problem = f"{e.code} {e.reason}"
                permanent = 400 <= e.code < 500 and e.code not in BRIEF
            except NETWORK as e:
                problem = str(getattr(e, "reason", "") or e or type(e).__name__)
            have = part.stat().st_size
            # Reset the failures only after bytes that no earlier attempt reached.
            failures = 0 if have > furthest else failures + 1
            furthest = max(furthest, have)
            if have < size and (permanent or failures > len(PATIENCE)):
                raise Unfit(f"{url}: {problem}, {have:,} of {size:,} bytes are downloaded; the "
                            f"same command continues; or put the file at {path}")
            if have < size and failures:
                time.sleep(PATIENCE[failures - 1])
    try:
        check_hash(part, url, have, size, expected,
                   "deleted, so the same command downloads it anew")
    except Unfit:
        part.unlink()
        raise
    publish(part, path)


def check_hash(path, name, found, size, expected, advice):
    """Raise Unfit if a file of `found` bytes has another sha256. name: the file in the message."""
    if (digest := sha256(path)) != expected:
        raise Unfit(f"{name}: {found:,} bytes with sha256 {digest}, "
                    f"expected {size:,} with {expected}", advice)


def fetch(url, part, size, bar):
    """
    Request the rest of the file, of `size` bytes, and append it to `part`.

    If the server ignores the range and sends the whole file, `part` is emptied first.
    """
    have = part.stat().st_size
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=30) as answer, open(part, "ab") as f:
        is_range = answer.status == 206
        if is_range and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise http.client.HTTPException("the server sent another range than the one asked for")
        if not is_range:
            f.truncate(0)
            bar.reset()
            have = 0
        # Stop reading a longer answer one block past `size`; its hash will differ.
        while have <= size and (block := answer.read(1 << 16)):
            f.write(block)
            have += len(block)
            bar.update(len(block))
