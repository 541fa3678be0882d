"""What looks like a key, a token or a password stays out of everything that is logged."""
import os
import re

SECRET_NAME = re.compile(
    r"(?i)(^|[-_])((api|secret|access|private)?_?key|(access|auth|api|bot|hub)?token|[a-z]*secret|[a-z]*passw(or)?d|[a-z]*passphrase"
    r"|(ssh|db)?pass(?=$)|pwd|credentials?|(git(hub|lab)?|gh|azure|ado)_pat|rediscli_auth)s?([-_]|$)")
IS = r"[\"']?\s{0,3}[=:]\s{0,3}"
WORD = r"[^\s\"',;]"
VALUE = r"(?:(?P<quote>[\"'])(?P<quoted>(?:(?!(?P=quote))[^\n]){6,200})(?P=quote)|[\"']?(?P<word>" + WORD + "{6,}))"
RANDOM = rf"(?=[\"']?(?![/~<])(?:(?={WORD}{{0,200}}\d){WORD}{{0,200}}[A-Za-z]|{WORD}{{24}}))"  # no word, number, path or <s>
SECRET_SHAPES = [re.compile(shape) for shape in (
    r"\b(?P<known>(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abps]-|AKIA|AIza|wandb_v1_|eyJ)[\w.-]{12,})",  # of known issuers
    r"(?<=://)(?P<user>[^/\s:@\[]{0,100}:(?!\d{1,5}[/,;)])[^/\s\"'<>]{1,200})(?=@)",    # user:password@host, to the last @ ...
    r"(?<=://)(?P<user>[^/\s:@\[]{0,100}:(?!\d{1,5}[/,;)])[^\s@\"'<>,]{1,200})(?=@)",  # ... or with a slash; no port
    r"(?<=://)(?P<user>(?=[\w.-]{0,200}\d)[\w.-]{16,200})(?=@)",                        # token@host
    r"(?i)\bauthorization" + IS + r"[\"']?(?:basic|bearer|token|digest|negotiate|apikey) {1,3}(?P<word>" + WORD + "{6,})",
    r"(?i)(?<=bearer )(?P<word>(?=\S{0,200}\d)\S{8,})",
    r"(?i)(?:passw(?:or)?d|passphrase|(?:api|access|secret)[-_]?key|(?:token|secret)(?==(?![\d.]+\b))|(?-i:[A-Z0-9]_PASS)"
    r"|(?<![a-z0-9])(?:db|smtp|ftp|mail|user|admin|root|mysql|ssh)[-_]?pass|(?:git(?:hub|lab)?|gh|azure|ado)[-_]pat)" + IS + VALUE,
    r"(?i)(?:token|secret|pwd)" + IS + RANDOM + VALUE,
    r"(?i)--[\w-]{0,40}(?:passw(?:or)?d|passphrase|token|secret|api[-_]?key) {1,3}" + RANDOM + r"(?P<word>[^\s-]\S{5,})")]
HIDDEN = "***"


def secret_values():
    """The values of environment variables whose names say that they are secret; PWD is the folder."""
    return [v for k, v in os.environ.items() if SECRET_NAME.search(k) and len(v) >= 8 and k != "PWD"]


def hide(match):
    """The match without the group that matched last in it."""
    start, end = match.span(match.lastgroup)
    return match.string[match.start():start] + HIDDEN + match.string[end:match.end()]


def redact(value, secrets=None):
    """The same text, list or dict without what looks like a key, a token or a password; secrets: by default the environment's."""
    secrets = secret_values() if secrets is None else secrets
    if isinstance(value, dict):
        return {k: HIDDEN if isinstance(v, str) and SECRET_NAME.search(str(k)) and v else redact(v, secrets)
                for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        words = [redact(v, secrets) for v in value]  # of a command line: --password VALUE
        named = [isinstance(v, str) and v.startswith("-") and "=" not in v and SECRET_NAME.search(v) for v in value]
        return [HIDDEN if i and named[i - 1] and isinstance(w, str) else w for i, w in enumerate(words)]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    for shape in SECRET_SHAPES:
        value = shape.sub(hide, value)
    return value
