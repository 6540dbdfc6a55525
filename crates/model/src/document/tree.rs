//! The untyped document: what JSON and YAML have in common, with duplicate keys kept and lines where the parser knows them.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::Format;
use crate::{Fault, Reason};

/// Largest input, bytes.
pub const MAX_BYTES: usize = 16 * 1024 * 1024;
/// Deepest nesting of YAML; the model itself needs eight levels. The YAML reader's frames are large (about 40 KiB a level unoptimised): this fits a
/// thread of 2 MiB. JSON nests 128 levels at most, cheaply.
pub const MAX_DEPTH: usize = 20;

/// A value with its line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tree {
    pub(crate) node: Node,
    pub(crate) line: Option<u64>,
}

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    Null,
    Bool(bool),
    Int(i128),
    /// Kept for messages only: no field of the model is a fraction.
    Float(f64),
    Text(String),
    List(Vec<Tree>),
    Map(Vec<(String, Tree)>),
}

impl Node {
    /// The type's name in messages.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Bool(_) => "a boolean",
            Self::Int(_) => "a number",
            Self::Float(_) => "a fraction",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Map(_) => "a mapping",
        }
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => Ok(()),
            Self::Bool(v) => v.fmt(f),
            Self::Int(v) => v.fmt(f),
            Self::Float(v) => v.fmt(f),
            Self::Text(v) => fmt::Debug::fmt(v, f),
            Self::List(v) => write!(f, "[{} items]", v.len()),
            Self::Map(v) => write!(f, "{{{} fields}}", v.len()),
        }
    }
}

/// Reads the input.
pub(crate) fn read(bytes: &[u8], format: Format) -> Result<Tree, Fault> {
    if bytes.len() > MAX_BYTES {
        let message =
            format!("the document is larger than {MAX_BYTES} bytes; split it over several clusters");
        return Err(Fault::new(Reason::InputTooLarge, "", format!("{} bytes", bytes.len()), message));
    }
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = 1 + bytes.iter().take(e.valid_up_to()).filter(|&&b| b == b'\n').count() as u64;
        let mut f = Fault::new(Reason::SyntaxError, "", "", "the document is not UTF-8");
        f.line = Some(line);
        f
    })?;
    match format {
        Format::Json => json(text),
        Format::Yaml => yaml(text),
    }
}

/// A JSON document whose lists of objects are not read yet: item by item, a large document needs little memory.
pub(crate) struct Split<'t> {
    /// The document, these lists empty.
    pub(crate) tree: Tree,
    /// Their items.
    pub(crate) lists: BTreeMap<String, Vec<&'t RawValue>>,
}

/// Splits a JSON document at the lists of the given names. `None` when it has to be read whole, if only to say what is wrong with it.
pub(crate) fn split<'t>(bytes: &'t [u8], names: &[&str]) -> Option<Split<'t>> {
    let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= MAX_BYTES)?;
    let fields: RawFields<'t> = serde_json::from_str(text.strip_prefix('\u{feff}').unwrap_or(text)).ok()?;
    let (mut map, mut lists) = (Vec::new(), BTreeMap::new());
    for (name, raw) in fields.0 {
        let node = if names.contains(&name.as_str()) && raw.get().starts_with('[') {
            if lists.insert(name.clone(), items(raw.get())?).is_some() {
                return None;
            }
            Tree { node: Node::List(Vec::new()), line: None }
        } else {
            json(raw.get()).ok()?
        };
        map.push((name, node));
    }
    Some(Split { tree: Tree { node: Node::Map(map), line: None }, lists })
}

/// The items of a JSON array.
pub(crate) fn items(text: &str) -> Option<Vec<&RawValue>> {
    serde_json::from_str(text).ok()
}

/// Fields of a JSON object, repeated ones too.
struct RawFields<'t>(Vec<(String, &'t RawValue)>);

impl<'de> Deserialize<'de> for RawFields<'de> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = RawFields<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(RawFields(fields))
            }
        }
        d.deserialize_map(Fields)
    }
}

/// Reads one JSON value.
pub(crate) fn read_json(text: &str) -> Result<Tree, Fault> {
    json(text)
}

fn json(text: &str) -> Result<Tree, Fault> {
    // serde_json nests 128 levels at most and refuses what follows the first document.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    serde_json::from_str::<Json>(text).map(|t| t.0).map_err(|e| {
        let mut f = Fault::new(Reason::SyntaxError, "", "", format!("not a JSON document: {e}"));
        f.line = u64::try_from(e.line()).ok();
        f
    })
}

fn yaml(text: &str) -> Result<Tree, Fault> {
    serde_saphyr::from_str_with_options::<serde_saphyr::Spanned<Yaml>>(text, yaml_options(MAX_BYTES))
        .map(Tree::from)
        .map_err(|e| {
            let mut f = Fault::new(Reason::SyntaxError, "", "", format!("not a single YAML document: {e}"));
            f.line = e.location().map(|l| l.line()).filter(|&l| l > 0);
            f
        })
}

/// Bounds and strictness for every YAML text of this crate.
pub(crate) fn yaml_options(bytes: usize) -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_reader_input_bytes: Some(bytes),
            max_depth: MAX_DEPTH,
            max_events: 8_000_000,
            max_nodes: 4_000_000,
            max_total_scalar_bytes: bytes,
            max_documents: 1,
        },
        // Aliases are for repeated labels and the like, not for building large documents from small ones.
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 100_000, max_replay_stack_depth: 16 },
        // Both keys reach the reader, which names the second one with its path.
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::PassThrough,
        // `<<` is then a field nobody knows.
        merge_keys: serde_saphyr::MergeKeyPolicy::AsOrdinary,
        strict_booleans: true,
        legacy_octal_numbers: false,
        leading_zero_numbers_as_strings: true,
        underscored_numbers_as_strings: true,
        non_finite_float_policy: serde_saphyr::NonFiniteFloatPolicy::AsString,
        with_snippet: false,
    }
}

/// A JSON value; its deserializer does not tell lines.
struct Json(Tree);
/// A YAML value, wrapped in its span by the parser.
struct Yaml(Node);

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(NodeVisitor::<Self>(PhantomData)).map(|node| Self(Tree { node, line: None }))
    }
}

impl<'de> Deserialize<'de> for Yaml {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(NodeVisitor::<serde_saphyr::Spanned<Self>>(PhantomData)).map(Self)
    }
}

impl From<Json> for Tree {
    fn from(v: Json) -> Self {
        v.0
    }
}

impl From<serde_saphyr::Spanned<Yaml>> for Tree {
    fn from(v: serde_saphyr::Spanned<Yaml>) -> Self {
        let line = v.referenced.line();
        Self { node: v.value.0, line: (line > 0).then_some(line) }
    }
}

/// Builds a [`Node`] whose children are read as `T`.
struct NodeVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Into<Tree>> Visitor<'de> for NodeVisitor<T> {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }
    fn visit_bool<E>(self, v: bool) -> Result<Node, E> {
        Ok(Node::Bool(v))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Node, E> {
        Ok(Node::Int(v.into()))
    }
    fn visit_u64<E>(self, v: u64) -> Result<Node, E> {
        Ok(Node::Int(v.into()))
    }
    fn visit_i128<E>(self, v: i128) -> Result<Node, E> {
        Ok(Node::Int(v))
    }
    fn visit_u128<E>(self, v: u128) -> Result<Node, E> {
        Ok(i128::try_from(v).map_or(Node::Float(v as f64), Node::Int))
    }
    fn visit_f64<E>(self, v: f64) -> Result<Node, E> {
        Ok(Node::Float(v))
    }
    fn visit_str<E>(self, v: &str) -> Result<Node, E> {
        Ok(Node::Text(v.to_owned()))
    }
    fn visit_string<E>(self, v: String) -> Result<Node, E> {
        Ok(Node::Text(v))
    }
    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }
    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }
    fn visit_some<D: Deserializer<'de>>(self, d: D) -> Result<Node, D::Error> {
        d.deserialize_any(self)
    }
    fn visit_newtype_struct<D: Deserializer<'de>>(self, d: D) -> Result<Node, D::Error> {
        d.deserialize_any(self)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(v) = seq.next_element::<T>()? {
            items.push(v.into());
        }
        Ok(Node::List(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut fields = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            fields.push((key, map.next_value::<T>()?.into()));
        }
        Ok(Node::Map(fields))
    }
}
