"""What looks like a key, a token or a password stays out of everything that is logged."""
import os
import re

SECRET_NAME = re.compile(r"(?i)(^|[-_])(api_?key|key|token|secret|passw(or)?d|pwd|credentials?)s?([-_]|$)")
SECRET_SHAPE = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abps]-|AKIA|AIza|wandb_v1_|eyJ)[\w.-]{12,}"  # of well-known issuers
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"                                                       # user:password@host
    r"|(?i:(?<=bearer )\S{8,})"
    r"|(?i:(?:api[-_]?key|token|secret|passw(?:or)?d|pwd|access[-_]key)[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;]{6,})")
HIDDEN = "***"


def secret_values():
    """The values of environment variables whose names say that they are secret."""
    return [v for k, v in os.environ.items() if SECRET_NAME.search(k) and len(v) >= 8]


def redact(value):
    """The same text, list or dict without what looks like a key, a token or a password."""
    if isinstance(value, dict):
        return {k: HIDDEN if isinstance(v, str) and SECRET_NAME.search(str(k)) and v else redact(v)
                for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        words = [redact(v) for v in value]  # of a command line: --password VALUE
        named = [isinstance(v, str) and v.startswith("-") and "=" not in v and SECRET_NAME.search(v) for v in value]
        return [HIDDEN if i and named[i - 1] and isinstance(w, str) else w for i, w in enumerate(words)]
    if not isinstance(value, str):
        return value
    for secret in secret_values():
        value = value.replace(secret, HIDDEN)
    return SECRET_SHAPE.sub(lambda m: m[0].replace(m["value"] or m[0], HIDDEN), value)
