"""
Text to tokens. From the lower module to the upper; no module imports one that comes later:

    blocks        UTF-8 files block by block, and the errors of files without text
    encodings     the encoding of bytes
    conversations records of conversations
    tables        .csv, .tsv, .parquet, .json and .jsonl
    readers       any file to UTF-8
    stories       the built-in stories
    questions     questions about them, with answers
    pairs         minimal pairs from them: a right and a wrong text
    downloads     texts that are downloaded
    sources       what --data may name; a module there is a source of your own
    corpus        where the documents of a source are
    prepared      the prepared folder and its checks
    vocabulary    made for a text, or taken from elsewhere
    encode        documents to token ids, by worker processes
    prepare       a source to a prepared folder
    packing       conversations in rows of one length
    survey        what a prepared text looks like

May import engine.formats, engine.tracking, tokenizer.py, configurator.py and the modules of engine
itself (files, streams, untrusted, advice); never engine.training or engine.debug.
"""
