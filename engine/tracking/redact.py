"""
Redaction of keys, tokens and passwords before settings, environment variables, URLs, command lines
and the program's diff are logged. Text of a model or of the user's data is not redacted, and a
checkpoint keeps its settings as they were given.

The key formats of issuers follow the rules of gitleaks (config/gitleaks.toml of
https://github.com/gitleaks/gitleaks) and the plugins of https://github.com/Yelp/detect-secrets.
"""
import os
import re

# Names of settings and variables whose values are secrets, unless they are a PLAIN_VALUE.
SECRET_NAME = re.compile(
    r"(?i)(^|[-_])((api|secret|access|private|account|shared_?access|storage|signing|encryption"
    r"|subscription)?_?key|(access|auth|api|bot|hub)?token|[a-z]*secret|[a-z]*passw(or)?d"
    r"|[a-z]*passphrase|(ssh|db)?pass(?=$)|pwd|credentials?|(git(hub|lab)?|gh|azure|ado)_pat"
    r"|rediscli_auth|connection_?string)s?([-_]|$)")
PASSWORD_NAME = re.compile(r"(?i)pass|pwd|secret|credential")  # even a PLAIN_VALUE is secret
PLAIN_VALUE = re.compile(r"(?i)[-+]?\d[\d_,.]*(?:e[-+]?\d+)?|true|false|none|null|auto")
EQUALS = r"[\"']?\s{0,3}[=:]\s{0,3}"
WORD = r"[^\s\"',;]"
NOT_CODE = (r"(?![A-Za-z_]{1,100}(?:\.[A-Za-z_]{1,100}){1,9}(?:[\s,;)\]}:\"']|$)"  # a.b
           r"|[A-Za-z_][\w.]{0,100}[(\[]"  # f(x), d["x"]
           r"|\$\{{0,2}\s?[A-Za-z_]|<\w{1,40}>|\{\w{0,40}\}|%\()")  # $VARIABLE, <token>, {}
VALUE = (r"(?:(?P<quote>[\"'])(?P<quoted>(?:(?!(?P=quote))[^\n]){6,200})(?P=quote)"
         r"|[\"']?" + NOT_CODE + "(?P<word>" + WORD + "{6,}))")
# Lookahead for a random-looking value: a letter and a digit, or 24 characters. This excludes words
# and numbers; the condition on the first character excludes paths and <s>.
RANDOM = (rf"(?=[\"']?(?![/~<])(?:(?={WORD}{{0,200}}\d){WORD}{{0,200}}[A-Za-z]"
          rf"|{WORD}{{24}}))")
HAS_DIGIT = r"(?=[\w.~+/=-]{0,200}\d)"
PREFIXES = (  # issuers' prefixes of keys; such a key must also have a digit
    r"hf_|api_org_|sk-|[sr]k_(?:live|test|prod)_|whsec_|gh[pousr]_|github_pat_"
    r"|gl(?:pat|ptt|dt|rt|cbt|ft|imt|soat|agent|oas|ffct)-|GR1348941|xox[a-z]-|xoxe\.|xapp-"
    r"|ABSK|bedrock-api-key-|AIza|ya29\.|GOCSPX-|LTAI|AKID|AKLT|wandb_v1_|eyJ|npm_|pypi-"
    r"|rubygems_|SG\.|do[opr]_v1_|shp(?:at|ca|pa|ss)_|dapi(?=[0-9a-f]{32})"
    r"|dp\.(?:pt|st|ct|sa|scim|audit)\.|dt0c01\.|glc_|glsa_|hv[bs]\.|HRKU-|lin_api_"
    r"|NR(?:AK|II|JS)-|pscale_(?:tkn|pw|oauth)_|PMAK-|pnu_|pul-|rdme_|sntry[su]_"
    r"|sq0(?:atp|csp)-|EAAA|EAA[MC]|sgp_|tfp_|tk-us-|xkeysib-|xsmtpsib-|shippo_(?:live|test)_"
    r"|sm_(?:aat|pat|sat)_|ntn_|pplx-|gsk_|xai-|r8_|lsv2_|tgp_v1_|nvapi-|sbp_|sb_secret_|nfp_"
    r"|figd_|fm[12][ar]?_|fo1_|fio-u-|ico-|duffel_(?:live|test)_|CLOJARS_|EZ[AT]K"
    r"|FLW(?:SECK|PUBK)_TEST-|AGE-SECRET-KEY-1|ops_eyJ|A3-[A-Z0-9]{6}-|ATATT3|ATCTT3|ATBB|AKCp"
    r"|cmVmd|AQVN|v1\.0-[0-9a-f]{24}-|dnkey-|p8e-|sha256~|CFPAT-|lob_"
    r"|access-(?:sandbox|development|production)-|(?:pat|sat)\.(?=[\w-]{22}\.)")
WHOLE_KEYS = (  # keys that are recognized by their complete format
    r"A(?:KIA|SIA|BIA|CCA|3T[A-Z0-9])[A-Z0-9]{16}\b|AIza[\w-]{35}|(?:hf_|api_org_)[A-Za-z]{34}\b"
    r"|(?:SK|AC)[0-9a-f]{32}\b|(?:pub)?key-[0-9a-f]{32}\b|[0-9a-f]{32}-us\d{1,2}\b"
    r"|pat[A-Za-z0-9]{14}\.[0-9a-f]{64}|[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,70}"
    r"|[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk|API-[A-Z0-9]{26}\b|\d{5,16}:A[\w-]{34}\b"
    r"|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,38}|[\w~.]{3}\dQ~[\w~.-]{31,34}"
    r"|4b1d[A-Za-z0-9]{38}\b|oy2[a-z0-9]{43}\b")
IN_URL = (  # names of signatures and keys in the query of a URL
    r"(?:x-[a-z]{2,8}-)?(?:signature|credential|security-token)|sig|q-signature|policy|key-pair-id"
    r"|(?:aws|oss)accesskeyid|googleaccessid|auth|key|code|sas"
    r"|[\w-]{0,30}(?:token|secret|passw(?:or)?d|pwd|(?:api|access|subscription)[-_]?key|jwt)")
# Secrets in a text. The named group that matches last is hidden.
SECRET_SHAPES = [re.compile(shape) for shape in (
    r"-----BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY(?: BLOCK)?-----"
    r"(?P<pem>[\s\S]{1,20000}?(?=-----END)|[A-Za-z0-9+/=\s\\]{1,20000})",
    r"(?<![A-Za-z0-9])(?P<known>(?:" + PREFIXES + r")" + HAS_DIGIT + r"[\w.~+/=-]{12,})",
    r"(?<![A-Za-z0-9_~.-])(?P<known>" + WHOLE_KEYS + ")",
    r"(?i)[?&;](?:" + IN_URL + r")=(?!\d{1,12}(?:[&#\s]|$))(?P<query>[^&\s\"'<>#]{6,})",
    r"(?i)hooks\.slack\.com/(?:services|workflows|triggers)/(?P<query>[\w/+-]{20,80})",
    r"(?i)discord(?:app)?\.com/api/webhooks/\d{1,30}/(?P<query>[\w-]{20,100})",
    r"(?i)webhook\.office\.com/webhookb2/(?P<query>[\w@/-]{40,300})",
    # user:password@host: the password may hold an @ or, in the second shape, a slash. In
    # http://host:80/a@b the 80 is a port.
    r"(?<=://)(?P<user>[^/\s:@\[]{0,100}:(?!\d{1,5}[/,;)])[^/\s\"'<>]{1,200})(?=@)",
    r"(?<=://)(?P<user>[^/\s:@\[]{0,100}:(?!\d{1,5}[/,;)])[^\s@\"'<>,]{1,200})(?=@)",
    r"(?<=://)(?P<user>(?=[\w.-]{0,200}\d)[\w.-]{16,200})(?=@)",  # token@host
    r"(?i)\bauthorization" + EQUALS + r"[\"']?"
    r"(?:basic|bearer|token|digest|negotiate|apikey) {1,3}(?P<word>" + WORD + "{6,})",
    r"(?i)(?<=bearer )(?P<word>(?=[\w.~+/=-]{0,200}\d)[\w.~+/=-]{8,})",
    r"(?i)\blogin\s{1,3}\S{1,100}\s{1,3}password\s{1,3}(?P<word>[^\s\"']{4,})",  # netrc
    # curl -u
    r"(?:^|\s)(?:-u|--user)[ =]{1,3}[\"']?[\w.@-]{1,60}:(?!\d+\b)(?P<word>[^\s\"']{3,})",
    r"[\"']?\b_?auth" + EQUALS + r"[\"']?"  # docker, npm
    r"(?P<word>(?=[A-Za-z0-9+/]{0,200}\d)[A-Za-z0-9+/]{16,}={0,2})",
    r"[\"']key[\"']\s{0,3}:\s{0,3}[\"'](?P<word>[0-9a-f]{32})",  # Kaggle
    r"(?i)(?:passw(?:or)?d|passphrase|(?:api|access|secret|private|account|signing|encryption"
    r"|subscription)[-_]?key(?:[-_]?id)?"
    r"|sharedaccesssignature|(?:token|secret)(?==(?![\d.]+\b))|(?-i:[A-Z0-9]_PASS)"
    r"|(?<![a-z0-9])(?:db|smtp|ftp|mail|user|admin|root|mysql|ssh)[-_]?pass"
    r"|(?:git(?:hub|lab)?|gh|azure|ado)[-_]pat)" + EQUALS + VALUE,
    r"(?i)(?:token|secret|pwd)" + EQUALS + RANDOM + VALUE,
    r"(?i)--[\w-]{0,40}(?:passw(?:or)?d|passphrase|token|secret|api[-_]?key) {1,3}" + RANDOM
    + r"(?P<word>[^\s-]\S{5,})")]
HIDDEN = "***"


def secret_values():
    """Return the values of environment variables with names of secrets, except PWD, the folder."""
    return [value for name, value in os.environ.items()
            if SECRET_NAME.search(name) and len(value) >= 8 and name != "PWD"]


def hide(match):
    """
    Return the match with its secret, the group that matched last, hidden. A PEM block keeps its
    lines, so that `git apply` takes a diff.
    """
    hidden = HIDDEN
    start, end = match.span(match.lastgroup)
    if match.lastgroup == "pem":
        hidden = re.sub("[A-Za-z0-9/=][A-Za-z0-9+/=:,. -]*", HIDDEN, match["pem"])
    return match.string[match.start():start] + hidden + match.string[end:match.end()]


def is_secret(name, value):
    """Return whether a setting holds a secret: token=abc does, max_tokens=512 does not."""
    if not value or not SECRET_NAME.search(name):
        return False
    return bool(PASSWORD_NAME.search(name)) or not PLAIN_VALUE.fullmatch(value)


def redact_words(words, secrets):
    """
    Return the words of a command line with secrets hidden: --token VALUE, --token=VALUE,
    TOKEN=VALUE, -u USER:VALUE, and those that match a shape.
    """
    found, before = [], ""
    for word in words:
        name, equals, value = word.partition("=") if isinstance(word, str) else ("", "", "")
        if not isinstance(word, str):
            found.append(redact(word, secrets))
        elif before.startswith("-") and "=" not in before and is_secret(before, word):
            found.append(HIDDEN)
        elif before in ("-u", "--user") and re.fullmatch(r"[\w.@-]+:(?!\d+$).{3,}", word):
            found.append(f"{word.partition(':')[0]}:{HIDDEN}")
        elif equals and re.fullmatch(r"[\w.-]{1,100}", name) and is_secret(name.lstrip("-"), value):
            found.append(f"{name}={HIDDEN}")
        else:
            found.append(redact(word, secrets))
        before = word if isinstance(word, str) else ""
    return found


def redact(value, secrets=None):
    """
    Return a text, dict, list or tuple (as a list) with keys, tokens and passwords hidden, and any
    other value unchanged. A list is read as a command line. secrets: texts that are hidden
    everywhere; None: those of the environment.
    """
    secrets = secret_values() if secrets is None else secrets
    if isinstance(value, dict):
        return {name: HIDDEN if isinstance(v, str) and is_secret(str(name), v)
                else redact(v, secrets) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return redact_words(value, secrets)
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    for shape in SECRET_SHAPES:
        value = shape.sub(hide, value)
    return value
