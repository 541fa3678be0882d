"""Check whether a tracker's server can be reached, before its client waits for it."""
import socket
import urllib.request
from urllib.parse import urlsplit


def proxy_of(url):
    """
    Return the URL of the proxy for a url from environment variables such as https_proxy; "" if
    there is no proxy.
    """
    parts = urlsplit(url)
    is_local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if is_local or urllib.request.proxy_bypass_environment(parts.netloc):
        return ""
    proxy = urllib.request.getproxies_environment().get(parts.scheme, "")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def is_reachable(url, seconds=3):
    """Return whether the host of a url, or the proxy in front of it, accepts connections."""
    try:
        parts = urlsplit(proxy_of(url) or url)
        port = parts.port or {"https": 443, "socks5": 1080}.get(parts.scheme, 80)
        socket.create_connection((parts.hostname, port), seconds).close()
        return True
    except (OSError, ValueError):  # ValueError: not a URL
        return False
