"""
Each kind of file is read with the right text or refused with a one-line error. The slow tests are
in long_files.py.
"""
import base64
import bz2
import csv
import errno
import functools
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

import data
from engine.text import blocks, encodings, readers, tables
from tests.test_data import contents, documents, prose, refused

ENGLISH = prose(4000)
TEXTS = {  # sentences written for these tests, by encoding
    "CP1252": [
        ("Il était une fois une petite fille qui aimait les fraises et la forêt près du "
         "château. Où êtes-vous allés cet été ? À la fête, ça a été gai.\n"),
        ("Es war einmal ein Müller, der hatte drei Söhne, eine Mühle und einen Kater; die Söhne "
         "mußten früh aufstehen.\n"),
        ("Había una vez un niño que vivía en la montaña. ¿Qué comió ayer? Comió piña, jamón y "
         "un poco de azúcar.\n"),
        ("Era uma vez uma criança que não tinha irmãos. Às vezes ela contava histórias às avós "
         "e aos pássaros do sertão.\n"),
        ("Det var en gång en pojke som åkte båt över ån till ön. Där låg en häst och sov under "
         "ett träd på ängen.\n"),
        "Es “waren” viele – sehr viele … They don’t know it’s 20 € or £15, and “that’s” that.\n"],
    "GB18030": [
        ("从前有一个小女孩，她住在森林旁边的一座小房子里。每天早上她都去河边打水，"
         "然后给妈妈做饭。\n"),
        ("算法的时间复杂度取决于输入的大小，我们在第三章里会看到这一点。def f(x): return x  # "
         "函数\n")],
    "BIG5-HKSCS": [
        "從前有一個小女孩，她住在森林旁邊的一座小房子裡。每天早上她都去河邊打水，"
        "然後給媽媽做飯。\n"],
    "CP932": [
        ("むかしむかし、あるところに、おじいさんとおばあさんがいました。"
         "おじいさんは山へしばかりに行きました。\n"),
        "この関数は引数を二つ取り、その和を返します。print(x)と書くと表示されます。\n"],
    "EUC-JP": [
        "むかしむかし、あるところに、おじいさんとおばあさんがいました。"
        "おじいさんは山へしばかりに行きました。\n"],
    "CP949": [
        "옛날 어느 마을에 착한 소년이 살고 있었습니다. 소년은 매일 아침 산에 올라가서 나무를 "
        "했습니다.\n"],
    "CP1251": [
        ("Жили-были дед и баба, и была у них курочка ряба. Снесла курочка яичко, не простое, а "
         "золотое.\n"),
        ("— Кто там? — спросила бабушка. — «Это я, — сказал мальчик, — открой!» И она, дрожа, "
         "открыла…\n")],
    "KOI8-U": [
        ("Жила собі дівчинка, яку всі любили, і була в неї бабуся, що мешкала біля лісу; "
         "щоранку вона їла яблука.\n"),
        ("Жили-были дед и баба, и была у них курочка ряба. Снесла курочка яичко, не простое, а "
         "золотое.\n")],
}
# Texts whose encoding can't be detected with certainty. They must never be read as another one.
OTHERS = {
    "cp1250": [
        ("Byla jednou jedna sladká dívenka, kterou musel každý milovat; ale nejvíce ji měla "
         "ráda její babička.\n"),
        ("Dawno temu żyła sobie mała dziewczynka, którą wszyscy lubili. Pewnego dnia poszła do "
         "lasu po świeże jagody.\n"),
        ("Volt egyszer egy öreg király, akinek három fia és egy szép lánya volt. A legkisebb "
         "fiú erdőbe ment fűért.\n")],
    "cp1254": [
        "Bir zamanlar küçük bir köyde yaşayan iyi kalpli bir kız vardı. Her sabah çeşmeye "
        "gidip su taşırdı.\n"],
    "cp1253": [
        "Μια φορά κι έναν καιρό ήταν ένα μικρό κορίτσι που ζούσε κοντά στο δάσος με τη μητέρα "
        "του.\n"],
    "cp1255": [
        "היה היתה פעם ילדה קטנה שגרה ליד היער עם אמא שלה, וכל בוקר הלכה אל הנהר להביא מים.\n"],
    "cp1256": [
        "كان يا ما كان في قديم الزمان فتاة صغيرة تعيش قرب الغابة مع أمها وكانت تذهب كل صباح "
        "إلى النهر.\n"],
    "cp874": ["กาลครั้งหนึ่งนานมาแล้ว มีเด็กหญิงตัวเล็กๆ อาศัยอยู่ใกล้ป่ากับแม่ของเธอ\n"],
    "mac_roman": [
        ("Il était une fois une fille qui aimait la forêt. Où êtes-vous allés cet été, près du "
         "château ?\n"),
        ("Es war einmal ein Müller, der hatte drei Söhne, eine Mühle und einen Kater; die Söhne "
         "mußten früh auf.\n"),
        "“Hello,” she said. “I don’t know why it’s so.” “That’s fine,” he said.\n"],
    "cp850": [
        ("Il était une fois une fille qui aimait la forêt. Où êtes-vous allés cet été, près du "
         "château ?\n"),
        ("Es war einmal ein Müller, der hatte drei Söhne, eine Mühle und einen Kater; die Söhne "
         "mußten früh auf.\n")],
    "iso8859_5": [
        "Жили-были дед и баба, и была у них курочка ряба. Снесла курочка яичко, не простое, а "
        "золотое.\n"],
    "cp866": [
        "Жили-были дед и баба, и была у них курочка ряба. Снесла курочка яичко, не простое, а "
        "золотое.\n"],
    "mac_cyrillic": [
        "Жили-были Дед и Баба, и была у них Курочка Ряба. Снесла Курочка яичко, не простое, а "
        "золотое.\n"],
    "iso8859_15": [
        "Le cœur de la sœur bat à l'œuvre ; il a été très gêné, là-bas, près du château, où "
        "l'œil rêvait d'été.\n"],
    "iso8859_2": [
        "Odată ca niciodată, o fată frumoasă locuia lângă pădure; dimineaţa aducea apă şi îşi "
        "ajuta mama.\n"],
    "cp1257": [
        "Reiz dzīvoja maza meitene, kura mīlēja ogas un ābolus; katru rītu viņa gāja uz upi "
        "pēc ūdens.\n"],
    "utf-8": ["damaged \ud800 in \udfff places: café, naïve, 日本語\n"],
}


@pytest.mark.parametrize("name", TEXTS)
def test_encodings_told_for_certain(name):
    for text in TEXTS[name]:
        for many in text * 2, text * 40, ENGLISH.replace("ï", "i") + text * 4:
            assert encodings.encoding(many.encode(name)) == name, many[:200]
        assert encodings.encoding(text[:30].encode(name)) in (name, "")


@pytest.mark.parametrize("name", OTHERS)
def test_encodings_that_are_not_are_not_guessed(name):
    for text in OTHERS[name]:
        for many in text, text * 40, ENGLISH.replace("ï", "i") + text * 3:
            assert encodings.encoding(many.encode(name, "surrogatepass")) == "", many[:200]


def test_unicode_by_its_zeros():
    for text in [ENGLISH, *(texts[0] for name, texts in TEXTS.items())]:
        for name in "UTF-16", "UTF-32", "UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE":
            found = encodings.encoding((text * 9).encode(name))
            assert (found == name or not found and "16" in name
                    and b"\0" not in (text * 9).encode(name)[1:2])
    assert encodings.encoding(np.random.default_rng(1).bytes(9000)) == ""
    assert encodings.encoding(b"\xff\xfe" + np.random.default_rng(1).bytes(9000)) == ""


# ---- thirty kinds of files -----------------------------------------------------------------------

def zipped(*names):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name in names:
            z.writestr(name, "content")
    return out.getvalue()


def saved(thing):
    out = io.BytesIO()
    torch.save(thing, out)
    return out.getvalue()


def table(delimiter=",", column="text", quoting=csv.QUOTE_MINIMAL):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, quoting=quoting)
    writer.writerows([["id", column, "note"], *([i, text, ""] for i, text in enumerate(ROWS))])
    return out.getvalue()


def rows(texts, mark):
    """Return a table whose texts are written without quotation marks and without escapes."""
    return (f"id{mark}text\n"
            f"{''.join(f'{i}{mark}{text}' + chr(10) for i, text in enumerate(texts))}").encode()


ROWS = [f'{prose(60, i).strip()}, "{i}"\nline; two\ttab é' for i in range(40)]
OBJECTS = [{"id": i, "text": text} for i, text in enumerate(ROWS)]
LINES = "".join(json.dumps(record) + "\n" for record in OBJECTS)
COMMAS = [f'{i}, as ever; {" ".join(prose(40, i).split())}, and "so" on' for i in range(40)]
SPEECH = [
    line for i in range(20)
    for line in (f'"Hello," said cat {i}.'.replace(",", " -"), f"It is {i}.", f'It said "{i}".')]
FRENCH = TEXTS["CP1252"][0] * 20
FRENCH_ROWS = [f"{i}. {TEXTS['CP1252'][0].strip()}" for i in range(40)]
FRENCH_OBJECTS = [{"text": row} for row in FRENCH_ROWS]
FRENCH_LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in FRENCH_OBJECTS)
CHINESE = TEXTS["GB18030"][0] * 20
PARQUET = base64.b64decode(  # 12 rows, written by pyarrow
    "UEFSMRUEFewIFdABTBUYFQASAAAotS/9YDYB9QIAxAMrAAAAcm93IDA6IGEgY2Fmw6ksIGEgInF1b3RlIgphbmQgYSBzZ"
    "WNvbmQgbGluZTEyMzQ1Njc4OSwxMDENAMEjmCoiyFjwyMC8gckGpgzMG5hsYMrAvIFhl6/SAxUAFSAVMiwVGBUQFQYVBh"
    "wAAAAotS/9IBCBAAACAAAAGAEEBRAyVHaYugAAFQQZLDUAGAZzY2hlbWEVAgAVDCUCGAR0ZXh0JQBMHAAAABYYGRwZHCY"
    "AHBUMGTUABhAZGAR0ZXh0FQwWGBbSCRbIAib4ASYIKSwVBBUAFQIAFQAVEBUCADwWjAgZBhkmABgAAAAW0gkWGCYIFsgC"
    "ACggcGFycXVldC1jcHAtYXJyb3cgdmVyc2lvbiAyNi4wLjEZHBwAAACYAAAAUEFSMQ==")

READ = {  # file name: (bytes, its text or a list of the texts of its rows)
    "plain.txt": (ENGLISH.encode(), ENGLISH),
    "bom.txt": (b"\xef\xbb\xbf" + ENGLISH.encode(), ENGLISH),
    "utf16.txt": (CHINESE.encode("utf-16"), CHINESE),
    "utf16be.txt": (b"\xfe\xff" + FRENCH.encode("utf-16-be"), FRENCH),
    "utf16le_without_bom.txt": (ENGLISH.encode("utf-16-le"), ENGLISH),
    "utf32.txt": (CHINESE.encode("utf-32"), CHINESE),
    "latin1.txt": (FRENCH.encode("latin-1"), FRENCH),
    "gb18030.txt": (CHINESE.encode("gb18030"), CHINESE),
    "sjis.txt": (TEXTS["CP932"][0].encode("cp932") * 20, TEXTS["CP932"][0] * 20),
    "crlf.txt": (ENGLISH.replace("\n", "\r\n").encode(), ENGLISH.replace("\n", "\r\n")),
    "mac.txt": (ENGLISH.replace("\n", "\r").encode(), ENGLISH.replace("\n", "\r")),
    "one_line.txt": (ENGLISH.replace("\n", " ").encode(), ENGLISH.replace("\n", " ")),
    "page.html": (b"<p>" + ENGLISH.encode(), "<p>" + ENGLISH),
    "notes.md": (b"# Notes\n" + ENGLISH.encode(), "# Notes\n" + ENGLISH),
    "code.py": (b"def f(x):\n    return x\n" * 30, "def f(x):\n    return x\n" * 30),
    "no_suffix": (ENGLISH.encode(), ENGLISH),
    "a.txt.gz": (gzip.compress(ENGLISH.encode()), ENGLISH),
    "two_members.gz": (
        gzip.compress(ENGLISH[:99].encode()) + gzip.compress(ENGLISH[99:].encode()), ENGLISH),
    "latin1.txt.gz": (gzip.compress(FRENCH.encode("latin-1")), FRENCH),
    "a.bz2": (bz2.compress(ENGLISH.encode()), ENGLISH),
    "a.xz": (lzma.compress(ENGLISH.encode()), ENGLISH),
    "packed_but_named.txt": (gzip.compress(ENGLISH.encode()), ENGLISH),
    "not_packed_but_named.gz": (ENGLISH.encode(), ENGLISH),
    "a.jsonl": (LINES.encode(), ROWS),
    "A.JSONL": (LINES.encode(), ROWS),
    "bom.jsonl": (b"\xef\xbb\xbf" + LINES.encode(), ROWS),
    "utf16.jsonl": (LINES.encode("utf-16"), ROWS),
    "a.jsonl.gz": (gzip.compress(LINES.encode()), ROWS),
    "list.json": (json.dumps(OBJECTS, indent=1).encode(), ROWS),
    "lines.json": (LINES.encode(), ROWS),
    "bom_lines.json": (LINES.encode("utf-8-sig"), ROWS),
    "lines.json.gz": (gzip.compress(LINES.encode()), ROWS),
    "lines.json.xz": (lzma.compress(LINES.encode()), ROWS),
    "list.json.gz": (gzip.compress(json.dumps(OBJECTS).encode()), ROWS),
    "latin1_lines.json": (FRENCH_LINES.encode("cp1252"), FRENCH_ROWS),
    "latin1_lines.json.gz": (gzip.compress(FRENCH_LINES.encode("cp1252")), FRENCH_ROWS),
    "latin1_list.json": (
        json.dumps(FRENCH_OBJECTS, ensure_ascii=False).encode("cp1252"), FRENCH_ROWS),
    "utf16_lines.json": (LINES.encode("utf-16"), ROWS),
    "utf16_lines.json.bz2": (bz2.compress(LINES.encode("utf-16-le")), ROWS),
    "utf16_list.json": (json.dumps(OBJECTS).encode("utf-16"), ROWS),
    "a.csv": (table().encode(), ROWS),
    "excel.csv": (table(";").encode("utf-8-sig"), ROWS),
    "latin1.csv": (table().encode("latin-1"), ROWS),
    "utf16.tsv": (table("\t").encode("utf-16"), ROWS),
    "a.csv.gz": (gzip.compress(table("|", "story", csv.QUOTE_ALL).encode()), ROWS),
    # A first line without a separator means that the other lines have none.
    "one_column.csv": ("\n".join(["text", *COMMAS]).encode(), COMMAS),
    "one_column.tsv": ("\n".join(["text", *COMMAS]).encode(), COMMAS),
    "one_column_in_quotes.csv": ("\n".join(
        ["text", *('"' + line.replace('"', '""') + '"' for line in COMMAS)]).encode(), COMMAS),
    "commas.tsv": ("\n".join(["text\tid", *(f"{line}\t1" for line in COMMAS)]).encode(), COMMAS),
    "empty_at_the_end.csv": (
        "\n".join(["id,text", *(f"1,{i}. {ENGLISH[:9]},," for i in range(40))]).encode(),
        [f"{i}. {ENGLISH[:9]}" for i in range(40)]),
    "blanks.csv": (
        ", ".join(["id", " text", "note\n"]).encode()
        + b"".join(b'%d, "%d, as ever", \n' % (i, i) for i in range(40)),
        [f"{i}, as ever" for i in range(40)]),
    "speech.tsv": (rows(SPEECH, "\t"), SPEECH), "speech.csv": (rows(SPEECH, ","), SPEECH),
    "speech_alone.csv": ("\n".join(["text", *SPEECH]).encode(), SPEECH),
    "open_quote.tsv": (rows(['"begins', *SPEECH], "\t"), ['"begins', *SPEECH]),
    "quote_to_the_end.tsv": (rows(["a", '"b', "c"], "\t"), ["a", '"b', "c"]),
    "enclosed.tsv": (rows([f'"{line}"' for line in SPEECH[1::3]], "\t"), SPEECH[1::3]),
    "lines_in_quotes.csv": (b'id,text\n1,"a\nb"\n2,"c, d"\n', ["a\nb", "c, d"]),
    "told_by_the_names.csv": (b'"id","text"\n"1","a\nb, b"\n"2","c"\n', ["a\nb, b", "c"]),
    "blank_key.jsonl": (b'{" text": "a"}\n{" text": "b"}\n', ["a", "b"]),
    "inner_key.jsonl": (b'{"text": "a", "of": {"text": "c"}}\n{"text": "b"}\n', ["a", "b"]),
}
REFUSED = {  # file name: (bytes, words of the error)
    "empty.txt": (b"", "is empty"),
    "white.txt": (b" \n\t \n" * 200, "no text"),
    "only_bom.txt": (b"\xef\xbb\xbf", "no text"),
    "zeros.txt": (ENGLISH.encode() + b"\0\0" + ENGLISH.encode(),
                  f"a zero byte at offset {len(ENGLISH.encode())}"),
    "picture.txt": (b"\x89PNG\r\n\x1a\n" + bytes(999), "a PNG image; expected text"),
    "weights.pt": (saved({"w": torch.ones(9)}), "a PyTorch file"),
    "pickled.txt": (pickle.dumps(ROWS), "pickled; expected text"),
    "model.gguf": (b"GGUF\3\0\0\0" + bytes(99), "a GGUF model"),
    "model.safetensors": (struct.pack("<Q", 90) + b'{"w":{}' + b" " * 99, "a safetensors model"),
    "texts.zip": (zipped("a.txt"), "unzip "),
    "report.docx": (zipped("[Content_Types].xml", "word/document.xml"), "Word document"),
    "report.pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n" + bytes(99), "a PDF document; pdftotext"),
    "texts.tar.gz": (gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar" + bytes(999)),
                     "a tar archive; unpack it first: tar xf"),
    "texts.zst": (b"\x28\xb5\x2f\xfd" + bytes(99),
                  "damaged near " if sys.version_info >= (3, 14) else "unpack it first: zstd -d "),
    "cut.gz": (gzip.compress(ENGLISH.encode())[:-99], "damaged near "),
    "wrong.gz": (gzip.compress(ENGLISH.encode())[:-8] + bytes(8), "damaged near "),
    "cut.bz2": (bz2.compress(ENGLISH.encode())[:-99], "damaged near "),
    "cut.xz": (lzma.compress(ENGLISH.encode())[:-99], "damaged near "),
    "mixed.txt": ("日本語の文章です。".encode() * 50 + b"\xff\xfe" + "日本語".encode() * 9,
                  "iconv -c -f UTF-8 -t UTF-8 "),
    "czech.txt": (OTHERS["cp1250"][0].encode("cp1250"), "iconv -f LATIN1 -t UTF-8 "),
    "odd.txt": ((CHINESE.encode("utf-16") + b"\n\xd8\n\xd8")[:-1], "UTF-16, but byte"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n',
                        "line 1 holds a character that UTF-8 can't write ('\\ud800')"),
    "cut.jsonl": (LINES.encode()[:-20], "line 40 is not JSON"),
    "surrogate.json": (b'[{"text": "a"}, {"text": "\\udc00"}]',
                       "object 2 holds a character that UTF-8 can't write"),
    "cut.json": (json.dumps(OBJECTS).encode()[:-20], "object 40 is not JSON"),
    "numbers.json": (b'[{"text": "a"}, 5]', "object 2 holds 5, not an object"),
    "other.csv": (table(column="body").encode(),
                  "no column 'text' or 'story', only id, body, note; name the one"),
    "short.csv": (b"id,text\n1,two\n3\n", "line 3 has 1 fields, the first line 2"),
    "commas.csv": (b'id,text\n1,"hello, world"\n2,hello, world\n',
                   "line 3 has 3 fields, the first line 2; put quotation marks"),
    "commas_behind.csv": (b"id,text,note\n1,two, three,4\n",
                          "line 2 has 4 fields, the first line 3; put quotation marks"),
    "tabs.tsv": (b"text\nhello\tworld\n",
                 "line 2 has 2 fields, the first line 1; put quotation marks"),
    "names_of_rows.csv": (b'"text"\n"1","hello"\n', "line 2 is not a row of a table"),
    "quote.csv": (table().encode() + b'7,"open', "is not a row of a table"),
    "twice.csv": (b"text,text\na0,The cat\n", "2 columns are called 'text'; rename all but one"),
    "twice_but_for_blanks.tsv": (b"text\ttext \na0\tThe cat\n", "2 columns are called 'text'"),
    "twice.jsonl": (b'{"text": "a", "text": "b"}\n', "line 1 has the key 'text' twice; rename one"),
    "twice.json": (b'[{"text": "x"}, {"text": "a", "text": "b"}]',
                   "object 2 has the key 'text' twice"),
    "lines_or_not.tsv": (rows(["a", '"b', "c", 'd"', "e"], "\t"),
                         "is unclear whether these marks enclose texts of several lines"),
    "lines_or_not.csv": (b'id,text\n1,"a\nb, b"\n2,c\n',
                         "is unclear whether these marks enclose texts of several lines"),
    "backslash.csv": (b'id,text\n1,"He said \\"no\\" then"\n2,"b"\n',
                      "line 2 is not a row of a table"),
    "not_doubled.tsv": (b'id\ttext\n1\t"He said "no" then"\n2\t"b"\n',
                        "line 2 is not a row of a table"),
    "nowhere.parquet": (b"PAR1" + bytes(99),
                        "cannot be read (ArrowInvalid: Parquet magic bytes not found"),
}


def test_an_object_that_is_too_long_is_refused_with_its_number_and_the_limit(
        tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tables, "MAX_LINE", 2 << 20)
    path = tmp_path / "long.json"
    # The second object has 2.6 million bytes.
    path.write_text(json.dumps([{"text": "short"}, {"text": "the cat sat. " * 200_000}]))
    error = refused(capfd, lambda: data.prepare(path, "byte", cache=tmp_path / "cache", workers=1))
    assert "object 2 is longer than 2 MB, or not JSON" in error


def both(folder):
    """Return the documents of a prepared folder: (training split, validation split)."""
    d = data.load(folder)
    return documents(d.train, d.tokenizer), documents(d.val, d.tokenizer)


@pytest.mark.parametrize("name", READ)
def test_files_that_are_read(name, tmp_path, capfd):
    content, expected = READ[name]
    (tmp_path / name).write_bytes(content)
    folder = data.prepare(tmp_path / name, "byte", cache=tmp_path / "cache", workers=1)
    train, val = both(folder)
    if isinstance(expected, list):
        assert sorted(train + val) == sorted(text.strip() for text in expected)
    else:
        assert expected in (train[0] + val[0], train[0] + " " + val[0])
    said = [line for line in capfd.readouterr().out.splitlines()
            if line.startswith(f"{tmp_path / name}: ")]
    for word, sign in (("unpacked", readers.is_packed(tmp_path / name)),
                       ("column", name.endswith(("csv", "tsv", "csv.gz")))):
        assert any(word in line for line in said) == (
            sign or word == "column" and "list.json" in name)
    assert any(", converted" in line for line in said) == any(
        word in name for word in ("utf16", "utf32", "latin1", "18030", "sjis"))
    assert sorted(p.name for p in folder.iterdir()) == [
        "meta.json", "tokenizer.json", "train.bin", "val.bin"]
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == [name]
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_answered_in_one_line(name, tmp_path, capfd):
    content, words = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    line = refused(
        capfd, lambda: data.prepare(tmp_path / name, "byte", cache=tmp_path / "cache", workers=1))
    assert words in line and line.startswith(f"error: {tmp_path / name}: ")
    assert not list(tmp_path.glob("cache/[!.]*")) and (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("name, pack", [
    ("a.txt", bytes), ("a.csv", bytes), ("a.jsonl", bytes), ("a.csv.gz", gzip.compress),
    ("a.jsonl.xz", lzma.compress), ("a.txt.bz2", bz2.compress), ("packed.txt", gzip.compress)])
def test_the_command_that_converts_a_file_keeps_its_kind(tmp_path, capfd, name, pack):
    """What the command has written is read like a file that was UTF-8 from the beginning."""
    texts = [f"{i} {OTHERS['cp1250'][0].strip()}" for i in range(40)]
    kind = name.split(".")[1]
    content = {"txt": "\n".join(texts),
               "csv": "\n".join(["id;text", *(f'{i};"{text}"' for i, text in enumerate(texts))]),
               "jsonl": "\n".join(json.dumps({"text": text}, ensure_ascii=False)
                                  for text in texts)}[kind]
    (tmp_path / f"utf8.{kind}").write_text(content)
    (tmp_path / name).write_bytes(pack(content.encode("cp1250")))

    def texts_of(path):
        return sum(both(data.prepare(path, "byte", cache=tmp_path / "cache", workers=1)), [])

    before = {path.name for path in tmp_path.iterdir()}
    line = refused(capfd, lambda: texts_of(tmp_path / name))
    words = line.partition("in place of LATIN1: ")[2].replace("LATIN1", "CP1250")
    subprocess.run(words, shell=True, cwd=tmp_path, check=True)
    (new,) = {path.name for path in tmp_path.iterdir()} - before - {"cache"}
    assert texts_of(tmp_path / new) == texts_of(tmp_path / f"utf8.{kind}")


def test_parquet(tmp_path, monkeypatch, capfd):
    """It is read where its package is installed; otherwise the error names the package."""
    (tmp_path / "a.parquet").write_bytes(PARQUET)
    call = functools.partial(data.prepare, tmp_path / "a.parquet", "byte", cache=tmp_path / "cache",
                             workers=1)
    train, val = both(call())
    assert sorted(train + val) == sorted(
        f'row {i}: a café, a "quote"\nand a second line' for i in range(12))
    assert "no column 'body', only text; name the one that holds the text: --column=" in refused(
        capfd, lambda: call(column="body"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(capfd, lambda: call(val_fraction=0.3)).endswith(
        "a Parquet table, which needs a package; pip install pyarrow")


def test_strings_of_parquet_in_every_layout(tmp_path):
    """
    Polars writes string_view, pandas dictionaries (categories), and old programs bytes. A dot
    selects a field of a struct.
    """
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def read(array, column="text", name="text"):
        parquet.write_table(pa.table({"id": range(len(array)), name: array}),
                            tmp_path / "a.parquet")
        try:
            new = readers.readable(tmp_path / "a.parquet", tmp_path / "copy", column,
                                   lambda path: None)[0]
        except readers.Unfit as e:
            return str(e)
        return [json.loads(line)[column] for line in new.read_text(encoding="utf-8").splitlines()]

    texts = ["a", "é", None, "", "b"]
    found = [text for text in texts if text]
    for kind in (pa.string(), pa.large_string(), pa.string_view(),
                 pa.dictionary(pa.int32(), pa.string()), pa.binary(), pa.large_binary(),
                 pa.binary_view(), pa.dictionary(pa.int8(), pa.large_string())):
        assert read(pa.array(texts).cast(kind)) == found, kind
    assert read(pa.array(texts), name=" text ") == found
    assert read(pa.array(texts), "a.b", "a.b") == found
    assert read(pa.ExtensionArray.from_storage(
        pa.json_(pa.string()), pa.array(["1", "2"]))) == ["1", "2"]
    inside = pa.array([{"body": "x", "n": 1}, None, {"body": None, "n": 2}])
    assert read(inside, "text.body") == ["x"]
    assert read(inside).endswith("expected strings; name a field of it, such as --column=text.body")
    assert "no column 'text.z', only id, text" in read(inside, "text.z")
    assert "'text.n' holds int64" in read(inside, "text.n")
    assert "holds list<" in read(pa.array([["a"]])) and "holds int64" in read(pa.array([1]))
    assert "'utf-8' codec can't decode byte 0xff" in read(pa.array([b"\xff"]))
    parquet.write_table(pa.Table.from_arrays([pa.array(texts)] * 2, ["text", " text"]),
                        tmp_path / "a.parquet")
    with pytest.raises(readers.Unfit, match="2 columns are called 'text'"):
        readers.readable(tmp_path / "a.parquet", tmp_path / "copy", "text", lambda path: None)


@pytest.mark.parametrize("rows", [
    {"text": ["a" * 300_000] * 9}, {"text": ["a" * 800] * 4000},
    {"messages": [[{"role": "user", "content": "Hi"},
                   {"role": "assistant", "content": "a" * 2000}]] * 900}
], ids=["long texts", "many texts", "conversations"])
def test_a_table_of_few_bytes_does_not_fill_the_disk(rows, tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    monkeypatch.setattr(tables, "GROWTH_FROM", 1 << 20)
    parquet.write_table(pa.table(rows), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(readers.Unfit, match="expected at most 200 for each"):
        readers.readable(tmp_path / "a.parquet", tmp_path / "copy", "text", lambda path: None)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_the_dialect_of_a_table_is_told(tmp_path):
    for content, words in (
            (rows(SPEECH, "\t"), "the column 'text' read, one of 2 separated by a tab; "
             "quotation marks belong to the texts"),
            (b'id;text\n1;"a; b"\n', "the column 'text' read, one of 2 separated by a semicolon; "
             "quotation marks enclose texts"),
            (b"id|story\n1|a\n",
             "the column 'story' read, one of 2 separated by a vertical bar"),
            (b"text\na\n", "the column 'text' read")):
        (tmp_path / "a.csv").write_bytes(content)
        assert readers.readable(tmp_path / "a.csv", tmp_path / "copy", "text",
                                lambda path: None)[2] == words


def test_a_column_by_name(tmp_path, capfd):
    (tmp_path / "a.csv").write_text(table(column="body"))
    (tmp_path / "b.jsonl").write_text(LINES.replace('"text"', '"body"'))
    for name in "a.csv", "b.jsonl":
        train, val = both(data.prepare(tmp_path / name, "byte", cache=tmp_path / "cache", workers=1,
                                       column="body"))
        assert sorted(train + val) == sorted(ROWS)
    assert "the keys id, body; expected" in refused(capfd, lambda: data.prepare(
        tmp_path / "b.jsonl", "byte", cache=tmp_path / "cache", workers=1))
    for name, content in (("c.jsonl", '{"текст": "a", "текст": "b"}'),
                          ("d.json", '[{"текст": "a", "текст": "b"}]')):
        (tmp_path / name).write_text(content)
        assert "1 has the key 'текст' twice" in refused(capfd, lambda: data.prepare(
            tmp_path / name, "byte", cache=tmp_path / "cache", workers=1, column="текст"))


# ---- pipes, links and folders --------------------------------------------------------------------

def test_things_that_are_no_files(tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "broken.txt").symlink_to("nowhere")
    (tmp_path / "folder.txt").mkdir()
    call = functools.partial(data.prepare, vocab_source="byte", cache=tmp_path / "cache", workers=1)
    for name, words in (("pipe.txt", "not a regular file"), ("loop.txt", "Too many levels"),
                        ("broken.txt", "no such file"),
                        ("folder.txt", "a folder without text files")):
        assert words in refused(capfd, lambda: call(tmp_path / name))
    (tmp_path / "real.txt").write_text(ENGLISH)
    (tmp_path / "linked.txt").symlink_to("real.txt")
    train, val = both(call(tmp_path))
    assert train[0] + " " + val[0] == ENGLISH
    assert ("4 file(s) hidden or of another kind: broken.txt, linked.txt, loop.txt, pipe.txt"
            in capfd.readouterr().out)


def test_a_file_that_cannot_be_opened(tmp_path, monkeypatch, capfd):
    for name in "a.txt", "b.txt", "secret.txt":
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(ENGLISH)
    plain = readers.open_untrusted

    def open_unless_secret(path, *more, **named):
        if "secret" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, *more, **named)

    monkeypatch.setattr(readers, "open_untrusted", open_unless_secret)

    call = functools.partial(data.prepare, tmp_path / "in", "byte", cache=tmp_path / "cache",
                             workers=1)
    assert (f"1 of 3 files can't be read: {tmp_path}/in/secret.txt: Permission denied; "
            "train.py --checks=-files or data.py --skip_bad=True") in refused(capfd, call)
    folder = call(skip_bad=True)
    assert data.load(folder).meta["skipped"] == [f"{tmp_path}/in/secret.txt"]
    assert both(folder)[0][0] == ENGLISH
    assert data.load(folder).meta["train_documents"] == 2


def test_all_bad_files_of_a_folder_are_told_at_once(tmp_path, capfd):
    bad = {"b.txt": b"\x89PNG\r\n\x1a\n", "c.jsonl": b'{"text": 5}\n',
           "d.txt.gz": gzip.compress(ENGLISH.encode())[:-9], "e.txt": CHINESE.encode() + b"\xff",
           "f.csv": b"a,text\n1\n"}
    (tmp_path / "in").mkdir()
    for i in range(30):
        (tmp_path / f"in/good{i:02}.txt").write_text(ENGLISH)
    for name, content in bad.items():
        (tmp_path / "in" / name).write_bytes(content)
    call = functools.partial(data.prepare, tmp_path / "in", "byte", cache=tmp_path / "cache",
                             workers=1)
    line = refused(capfd, call)
    assert "5 of 35 files can't be read: " in line
    assert line.endswith("--skip_bad=True leaves such files out")
    reasons = ["a PNG image", 'line 1 holds "text": 5', "damaged near ",
               f"byte 0xff at offset {len(CHINESE.encode())}", "line 2 has 1"]
    for name, reason in zip(bad, reasons):
        assert (f"{tmp_path}/in/{name}: {reason}" in line
                or f"{tmp_path}/in/{name}: not UTF-8 ({reason}" in line)
    d = data.load(call(skip_bad=True))
    assert (d.meta["train_documents"], d.meta["val_documents"]) == (27, 3)
    assert [p.rsplit("/")[-1] for p in d.meta["skipped"]] == sorted(bad)
    assert "5 of 35 files can't be read: " in capfd.readouterr().out


def test_a_source_tree(tmp_path, capfd):
    """
    All text files are read, because the other text files are larger than the documents. Once the
    documents are larger, they alone are read.
    """
    files = {
        "README.md": "# A program\n" * 9, "src/a.py": "print(1)\n" * 99, "src/b.c": "int x;\n" * 99,
        "requirements.txt": "numpy\n", "Makefile": "all:\n\tcc\n" * 9}
    others = {
        "logo.png": b"\x89PNG\r\n\x1a\n", "data.bin": bytes(range(256)) * 99,
        ".git/config": b"x = 1\n" * 999, "src/__pycache__/a.pyc": b"code",
        ".hidden": b"text\n" * 99}
    for name, content in {
            **{name: text.encode() for name, text in files.items()}, **others}.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(content)
    train, val = both(data.prepare(tmp_path / "tree", "byte", cache=tmp_path / "cache", workers=1,
                                   val_fraction=0.01))
    assert ("".join("".join(files[name] for name in sorted(files)).split())
            == "".join("".join(train + val).split()))
    said = capfd.readouterr().out
    assert "3 file(s) hidden or of another kind: .hidden, data.bin, logo.png" in said
    assert "2 folder(s): .git" in said
    (tmp_path / "tree/book.txt").write_text(ENGLISH)  # makes the documents larger
    train, val = both(data.prepare(tmp_path / "tree", "byte", cache=tmp_path / "cache", workers=1))
    assert len(train + val) == 3 and "7 file(s) hidden or of another kind" in capfd.readouterr().out


def test_a_folder_of_every_kind(tmp_path):
    """
    Compressed, converted and plain files are read together, in the order of their names. Two
    processes write the same bytes as one.
    """
    (tmp_path / "in").mkdir()
    for name in ("plain.txt", "gb18030.txt", "a.txt.gz", "a.jsonl", "a.csv", "list.json",
                 "latin1.csv"):
        (tmp_path / "in" / name).write_bytes(READ[name][0])
    one, two = (data.prepare(tmp_path / "in", "byte", cache=tmp_path / f"cache{n}", workers=n)
                for n in (1, 2))
    assert contents(one) == contents(two)
    train, val = both(one)
    assert {*ROWS, ENGLISH, CHINESE} <= {*train, *val}
    assert len(train + val) in (4 * 40 + 3, 4 * 40 + 4)


def test_a_file_of_two_encodings_is_not_read_as_one(tmp_path, capfd):
    """
    Its beginning is Windows-1252 for certain. The rest, in UTF-8, would decode as Windows-1252 too,
    with wrong letters.
    """
    lines = TEXTS["CP1252"][0]
    (tmp_path / "mixed.txt").write_bytes(
        (lines * 10_000).encode("cp1252") + (lines * 5_000).encode())
    said = refused(capfd, lambda: data.prepare(
        tmp_path / "mixed.txt", vocab_source="byte", cache=tmp_path / "cache"))
    assert "some of its lines are CP1252, others UTF-8" in said


def test_lines_that_end_in_carriage_returns_alone(tmp_path, monkeypatch):
    """No separator is lost, wherever a block ends."""
    for block in range(4096, 4120, 4):
        monkeypatch.setattr(blocks, "BLOCK", block)
        (tmp_path / "mac.txt").write_bytes(b"One day a dog ran.\r<|endoftext|>\r" * 1000)
        os.utime(tmp_path / "mac.txt", (block, block))
        found = data.load(
            data.prepare(tmp_path / "mac.txt", vocab_source="byte", cache=tmp_path / "cache"))
        assert found.meta["train_documents"] + found.meta["val_documents"] == 1000


def test_where_a_packed_file_is_damaged_is_told(tmp_path, capfd):
    whole = gzip.compress(os.urandom(300_000))
    (tmp_path / "cut.gz").write_bytes(whole[:200_000])
    said = refused(capfd, lambda: data.prepare(
        tmp_path / "cut.gz", vocab_source="byte", cache=tmp_path / "cache"))
    assert "damaged near byte 200,000" in said
