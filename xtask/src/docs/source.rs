//! Parses the source of types that are read from TOML: fields, docs and defaults.
//!
//! A name is searched in the crate that the file imports it from, otherwise in its own crate, first in the same file.
//! Only types that derive `Deserialize` are known.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use syn::punctuated::Punctuated;
use syn::{
    Attribute, Expr, Fields, Item, ItemEnum, ItemImpl, ItemUse, Lit, Meta, Token, Type, UseTree,
};

/// A type, and its position.
#[derive(Clone)]
pub struct Found<'a, T> {
    pub item: &'a T,
    pub file: &'a File,
}

/// One source file.
#[derive(Default)]
pub struct File {
    krate: String,
    structs: BTreeMap<String, syn::ItemStruct>,
    enums: BTreeMap<String, ItemEnum>,
    consts: BTreeMap<String, Expr>,
    functions: BTreeMap<String, Expr>,
    /// Fields of `impl Default`, by type and field.
    defaults: BTreeMap<(String, String), Expr>,
    /// Our crates from which names are imported.
    imports: BTreeMap<String, String>,
}

/// Sources of some crates.
pub struct Source(Vec<File>);

impl Source {
    /// Reads the crates with these names in the folder `crates`.
    pub fn read(crates: &Path, names: &[&str]) -> anyhow::Result<Self> {
        let mut files = vec![];
        for name in names {
            for path in rust_files(&crates.join(name).join("src"))? {
                let text = fs::read_to_string(&path)?;
                let parsed = syn::parse_file(&text)
                    .with_context(|| format!("cannot parse {}", path.display()))?;
                let mut file = File {
                    krate: (*name).into(),
                    ..File::default()
                };
                for item in parsed.items {
                    file.take(item)?;
                }
                files.push(file);
            }
        }
        Ok(Self(files))
    }

    /// A struct of a crate, by name.
    pub fn root<'a>(
        &'a self,
        krate: &str,
        name: &str,
    ) -> anyhow::Result<Found<'a, syn::ItemStruct>> {
        let mut files = self.0.iter().filter(|file| file.krate == krate);
        files
            .find_map(|file| file.structs.get(name).map(|item| Found { item, file }))
            .with_context(|| format!("crates/{krate} has no struct {name}"))
    }

    /// The struct that a name in a file refers to, if any.
    pub fn find_struct<'a>(
        &'a self,
        from: &'a File,
        name: &str,
    ) -> Option<Found<'a, syn::ItemStruct>> {
        self.look(from, name, |file| file.structs.get(name))
    }

    /// The enum that a name in a file refers to, if any.
    pub fn find_enum<'a>(&'a self, from: &'a File, name: &str) -> Option<Found<'a, ItemEnum>> {
        self.look(from, name, |file| file.enums.get(name))
    }

    fn look<'a, T>(
        &'a self,
        from: &'a File,
        name: &str,
        get: impl Fn(&'a File) -> Option<&'a T>,
    ) -> Option<Found<'a, T>> {
        let krate = from.imports.get(name).unwrap_or(&from.krate);
        let others = self.0.iter().filter(|file| file.krate == *krate);
        std::iter::once(from)
            .chain(others)
            .find_map(|file| get(file).map(|item| Found { item, file }))
    }

    /// A field's default as TOML; `None` if the field is required.
    pub fn default_of(
        &self,
        of: &Found<'_, syn::ItemStruct>,
        field: &syn::Field,
    ) -> anyhow::Result<Option<String>> {
        let name = field
            .ident
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default();
        if let Some(function) = serde(&field.attrs, "default")? {
            let Some(function) = function else {
                return self.default_of_type(of.file, &field.ty).map(Some);
            };
            let body = self.look(of.file, &function, |file| file.functions.get(&function));
            let body = body.with_context(|| format!("there is no fn {function}"))?;
            return self.value(body.file, body.item).map(Some);
        }
        if serde(&of.item.attrs, "default")?.is_some() {
            let key = (of.item.ident.to_string(), name);
            let value = of.file.defaults.get(&key);
            let value = value.with_context(|| format!("no default of {}.{}", key.0, key.1))?;
            return self.value(of.file, value).map(Some);
        }
        // serde reads a missing Option as None.
        Ok(generic(&field.ty, "Option").map(|_| String::new()))
    }

    fn default_of_type(&self, file: &File, ty: &Type) -> anyhow::Result<String> {
        let name = name(ty)?;
        Ok(match name.as_str() {
            "Option" => String::new(),
            "Vec" => "[]".into(),
            "BTreeMap" => "{}".into(),
            "String" | "PathBuf" => "\"\"".into(),
            "bool" => "false".into(),
            "f64" => "0.0".into(),
            "u16" | "u32" | "u64" | "usize" => "0".into(),
            _ => match self.find_enum(file, &name) {
                Some(found) => {
                    let is_default =
                        |v: &&syn::Variant| v.attrs.iter().any(|a| a.path().is_ident("default"));
                    let variant = found.item.variants.iter().find(is_default);
                    let variant = variant.with_context(|| format!("{name} has no default"))?;
                    format!("\"{}\"", variant_name(found.item, variant)?)
                }
                None => "see there".into(),
            },
        })
    }

    /// The value of an expression as TOML.
    fn value(&self, file: &File, expr: &Expr) -> anyhow::Result<String> {
        match expr {
            Expr::Lit(lit) => Ok(match &lit.lit {
                Lit::Str(text) => format!("{:?}", text.value()),
                Lit::Int(number) => number.base10_digits().into(),
                Lit::Float(number) => number.base10_digits().into(),
                Lit::Bool(value) => value.value.to_string(),
                _ => bail!("a literal that TOML has not"),
            }),
            Expr::MethodCall(call) if call.method == "into" => self.value(file, &call.receiver),
            Expr::Macro(list) if list.mac.path.is_ident("vec") => {
                let parser = Punctuated::<Expr, Token![,]>::parse_terminated;
                let items = list.mac.parse_body_with(parser)?;
                let items: Vec<_> = items
                    .iter()
                    .map(|item| self.value(file, item))
                    .collect::<Result<_, _>>()?;
                Ok(format!("[{}]", items.join(", ")))
            }
            Expr::Call(call) => match &*call.func {
                Expr::Path(path)
                    if path.path.segments.len() == 2
                        && path.path.segments[1].ident == "default" =>
                {
                    let ty = syn::parse_str(&path.path.segments[0].ident.to_string())?;
                    self.default_of_type(file, &ty)
                }
                _ => bail!("a call that is no default()"),
            },
            Expr::Path(path) => {
                let names: Vec<_> = path
                    .path
                    .segments
                    .iter()
                    .map(|s| s.ident.to_string())
                    .collect();
                match &names[..] {
                    [none] if none == "None" => Ok(String::new()),
                    [constant] => {
                        let found = self.look(file, constant, |file| file.consts.get(constant));
                        let found =
                            found.with_context(|| format!("there is no const {constant}"))?;
                        self.value(found.file, found.item)
                    }
                    [of, variant] => {
                        let found = self
                            .find_enum(file, of)
                            .with_context(|| format!("there is no enum {of}"))?;
                        let mut variants = found.item.variants.iter();
                        let variant = variants.find(|v| v.ident == variant);
                        let variant = variant.with_context(|| format!("{of} lacks a variant"))?;
                        Ok(format!("\"{}\"", variant_name(found.item, variant)?))
                    }
                    _ => bail!("the path {}", names.join("::")),
                }
            }
            _ => bail!("an expression that is no plain value"),
        }
        .map_err(|e: anyhow::Error| e.context("cannot tell a default"))
    }
}

impl File {
    fn take(&mut self, item: Item) -> anyhow::Result<()> {
        match item {
            Item::Struct(item) if is_read(&item.attrs) => {
                self.structs.insert(item.ident.to_string(), item);
            }
            Item::Enum(item) if is_read(&item.attrs) => {
                self.enums.insert(item.ident.to_string(), item);
            }
            Item::Const(item) => {
                self.consts.insert(item.ident.to_string(), *item.expr);
            }
            Item::Fn(item) if item.sig.inputs.is_empty() => {
                if let [syn::Stmt::Expr(expr, None)] = &item.block.stmts[..] {
                    self.functions
                        .insert(item.sig.ident.to_string(), expr.clone());
                }
            }
            Item::Impl(item) => self.take_default(&item),
            Item::Use(ItemUse {
                tree: UseTree::Path(path),
                ..
            }) => {
                if let Some(krate) = path.ident.to_string().strip_prefix("demeter_") {
                    self.import(krate, &path.tree);
                }
            }
            // The macro's body is an enum's, and the macro adds how it is read.
            Item::Macro(item) if item.mac.path.is_ident("workloads") => {
                let body = &item.mac.tokens;
                let name = quote::format_ident!("Workload");
                self.enums.insert(
                    name.to_string(),
                    syn::parse2(quote::quote! {
                        #[serde(tag = "kind", rename_all = "lowercase")]
                        enum #name { #body }
                    })?,
                );
            }
            _ => {}
        }
        Ok(())
    }

    fn take_default(&mut self, item: &ItemImpl) {
        let is_default = item
            .trait_
            .as_ref()
            .is_some_and(|(_, path, _)| path.is_ident("Default"));
        let (true, Ok(of)) = (is_default, name(&item.self_ty)) else {
            return;
        };
        for part in &item.items {
            let syn::ImplItem::Fn(function) = part else {
                continue;
            };
            if let [syn::Stmt::Expr(Expr::Struct(value), None)] = &function.block.stmts[..] {
                for field in &value.fields {
                    if let syn::Member::Named(name) = &field.member {
                        self.defaults
                            .insert((of.clone(), name.to_string()), field.expr.clone());
                    }
                }
            }
        }
    }

    fn import(&mut self, krate: &str, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => self.import(krate, &path.tree),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(krate, tree)),
            UseTree::Name(name) => {
                self.imports.insert(name.ident.to_string(), krate.into());
            }
            UseTree::Rename(_) | UseTree::Glob(_) => {}
        }
    }
}

fn rust_files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = vec![];
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(rust_files(&path)?);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn is_read(attrs: &[Attribute]) -> bool {
    attrs
        .iter()
        .filter(|a| a.path().is_ident("derive"))
        .any(|a| {
            let parser = Punctuated::<syn::Path, Token![,]>::parse_terminated;
            a.parse_args_with(parser)
                .is_ok_and(|paths| paths.iter().any(|p| p.is_ident("Deserialize")))
        })
}

/// The argument of `#[serde(KEY)]` or `#[serde(KEY = "..")]`, if present.
pub fn serde(attrs: &[Attribute], key: &str) -> anyhow::Result<Option<Option<String>>> {
    for attr in attrs.iter().filter(|a| a.path().is_ident("serde")) {
        let parser = Punctuated::<Meta, Token![,]>::parse_terminated;
        for meta in attr.parse_args_with(parser)? {
            match meta {
                Meta::Path(path) if path.is_ident(key) => return Ok(Some(None)),
                Meta::NameValue(pair) if pair.path.is_ident(key) => {
                    let Expr::Lit(syn::ExprLit {
                        lit: Lit::Str(text),
                        ..
                    }) = pair.value
                    else {
                        bail!("serde({key}) is no text");
                    };
                    return Ok(Some(Some(text.value())));
                }
                _ => {}
            }
        }
    }
    Ok(None)
}

/// An item's doc comment as one line, with code instead of links to code.
pub fn doc(attrs: &[Attribute]) -> String {
    let lines = attrs.iter().filter_map(|attr| match &attr.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(syn::ExprLit {
                lit: Lit::Str(text),
                ..
            }) => Some(text.value().trim().to_owned()),
            _ => None,
        },
        _ => None,
    });
    let lines = lines.filter(|line| !line.is_empty());
    let text = lines.collect::<Vec<_>>().join(" ");
    plain_links(&text)
}

/// Replaces rustdoc's links by their text.
fn plain_links(text: &str) -> String {
    let mut plain = String::new();
    for piece in text.replace("[`", "`").split("`]") {
        let is_path = |rest: &str| rest.starts_with("(crate::") || rest.starts_with("(Self::");
        let piece = match piece.split_once(')') {
            Some((target, rest)) if !plain.is_empty() && is_path(target) => rest,
            _ => piece,
        };
        plain += piece;
        plain.push('`');
    }
    plain.pop();
    plain
}

/// A field's key.
pub fn key(field: &syn::Field) -> anyhow::Result<String> {
    let own = field
        .ident
        .as_ref()
        .context("a field without a name")?
        .to_string();
    Ok(serde(&field.attrs, "rename")?.flatten().unwrap_or(own))
}

/// A variant's name in TOML.
pub fn variant_name(of: &ItemEnum, variant: &syn::Variant) -> anyhow::Result<String> {
    if let Some(name) = serde(&variant.attrs, "rename")?.flatten() {
        return Ok(name);
    }
    let own = variant.ident.to_string();
    let between = match serde(&of.attrs, "rename_all")?.flatten().as_deref() {
        None => return Ok(own),
        Some("lowercase") => "",
        Some("kebab-case") => "-",
        Some("snake_case") => "_",
        Some(other) => bail!("rename_all = {other}"),
    };
    let mut name = String::new();
    for (i, letter) in own.char_indices() {
        if letter.is_uppercase() && i > 0 {
            name += between;
        }
        name.extend(letter.to_lowercase());
    }
    Ok(name)
}

/// The last name of a type's path.
pub fn name(ty: &Type) -> anyhow::Result<String> {
    let Type::Path(path) = ty else {
        bail!("a type without a name");
    };
    let last = path.path.segments.last();
    last.map(|s| s.ident.to_string())
        .ok_or_else(|| anyhow!("an empty path"))
}

/// The last type argument of a type of this name: the content of an Option, list or map.
pub fn generic<'a>(ty: &'a Type, outer: &str) -> Option<&'a Type> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last().filter(|s| s.ident == outer)?;
    let syn::PathArguments::AngleBracketed(arguments) = &last.arguments else {
        return None;
    };
    arguments
        .args
        .iter()
        .rev()
        .find_map(|argument| match argument {
            syn::GenericArgument::Type(ty) => Some(ty),
            _ => None,
        })
}

/// A variant's payload, if any.
pub fn payload(variant: &syn::Variant) -> Option<&Type> {
    match &variant.fields {
        Fields::Unnamed(fields) => fields.unnamed.first().map(|field| &field.ty),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_show_what_they_are_of() {
        for (text, want) in [
            (
                "see [`Role`](crate::Role), or [`Self::a`](Self::a).",
                "see `Role`, or `Self::a`.",
            ),
            ("[`A`] (crate) `b` (c)", "`A` (crate) `b` (c)"),
            ("", ""),
        ] {
            assert_eq!(plain_links(text), want);
        }
    }
}
