//! A sorted map whose clones share what neither of them changes: a clone costs a pointer per chunk, a change copies one chunk, and what two
//! versions differ in is found without looking at what they share.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

/// Entries of a full chunk.
const MOST: usize = 128;
/// A chunk with fewer joins its neighbour when both fit in three quarters of one.
const FEW: usize = 24;

type Chunk<K, V> = Arc<Vec<(K, V)>>;

/// See the module's comment.
pub struct SharedMap<K, V> {
    /// None is empty; keys ascend through all of them.
    chunks: Vec<Chunk<K, V>>,
    len: usize,
}

impl<K, V> SharedMap<K, V> {
    /// Nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self { chunks: Vec::new(), len: 0 }
    }

    /// How many entries there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether both are the same version: cheap, and `false` says nothing about what is in them.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.chunks.len() == other.chunks.len()
            && self.chunks.iter().zip(&other.chunks).all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// All entries, by key.
    pub fn iter(&self) -> Iter<'_, K, V> {
        Iter { map: self, at: Place::default() }
    }

    /// All keys, ascending.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    /// All values, by key.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    fn at(&self, place: Place) -> Option<(&K, &V)> {
        let (key, value) = self.chunks.get(place.chunk)?.get(place.entry)?;
        Some((key, value))
    }

    /// The entry after.
    fn after(&self, place: Place) -> Place {
        let whole = self.chunks.get(place.chunk).is_none_or(|c| place.entry + 1 >= c.len());
        if whole {
            Place { chunk: place.chunk + 1, entry: 0 }
        } else {
            Place { entry: place.entry + 1, ..place }
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    chunk: usize,
    entry: usize,
}

impl<K: Ord, V> SharedMap<K, V> {
    /// Where a key is, or where it belongs (an entry beyond a chunk's last stands for its end).
    fn find<Q: Ord + ?Sized>(&self, key: &Q) -> Result<Place, Place>
    where
        K: Borrow<Q>,
    {
        let beyond =
            self.chunks.partition_point(|c| c.first().is_some_and(|(first, _)| first.borrow() <= key));
        let chunk = beyond.saturating_sub(1);
        let Some(entries) = self.chunks.get(chunk) else { return Err(Place::default()) };
        match entries.binary_search_by(|(k, _)| k.borrow().cmp(key)) {
            Ok(entry) => Ok(Place { chunk, entry }),
            Err(entry) => Err(Place { chunk, entry }),
        }
    }

    /// A key's value.
    #[must_use]
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.find(key).ok().and_then(|place| self.at(place)).map(|(_, value)| value)
    }

    /// Whether a key is there.
    #[must_use]
    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.find(key).is_ok()
    }

    /// The entries from a key on.
    pub fn starting_at<Q: Ord + ?Sized>(&self, key: &Q) -> Iter<'_, K, V>
    where
        K: Borrow<Q>,
    {
        let at = match self.find(key) {
            Ok(place) => place,
            Err(place) if self.at(place).is_none() => Place { chunk: place.chunk + 1, entry: 0 },
            Err(place) => place,
        };
        Iter { map: self, at }
    }

    /// Both maps side by side, in the order of keys, without the parts that they share.
    pub fn apart<'a>(
        &'a self,
        other: &'a Self,
    ) -> impl Iterator<Item = (&'a K, Option<&'a V>, Option<&'a V>)> {
        let (mut left, mut right) = (Place::default(), Place::default());
        std::iter::from_fn(move || {
            while left.entry == 0
                && right.entry == 0
                && let (Some(a), Some(b)) = (self.chunks.get(left.chunk), other.chunks.get(right.chunk))
                && Arc::ptr_eq(a, b)
            {
                left.chunk += 1;
                right.chunk += 1;
            }
            let (a, b) = (self.at(left), other.at(right));
            let order = match (a, b) {
                (Some((x, _)), Some((y, _))) => x.cmp(y),
                (Some(_), None) => Ordering::Less,
                (None, _) => Ordering::Greater,
            };
            let (a, b) = (a.filter(|_| order.is_le()), b.filter(|_| order.is_ge()));
            if a.is_some() {
                left = self.after(left);
            }
            if b.is_some() {
                right = other.after(right);
            }
            let key = a.or(b)?.0;
            Some((key, a.map(|(_, v)| v), b.map(|(_, v)| v)))
        })
    }
}

impl<K: Ord + Clone, V: Clone> SharedMap<K, V> {
    /// A key's value, to change.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let place = self.find(key).ok()?;
        let chunk = Arc::make_mut(self.chunks.get_mut(place.chunk)?);
        chunk.get_mut(place.entry).map(|(_, value)| value)
    }

    /// Sets a key's value; returns the one it had.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.find(&key) {
            Ok(place) => {
                let chunk = Arc::make_mut(self.chunks.get_mut(place.chunk)?);
                chunk.get_mut(place.entry).map(|(_, held)| std::mem::replace(held, value))
            }
            Err(place) => {
                self.len += 1;
                let Some(chunk) = self.chunks.get_mut(place.chunk) else {
                    self.chunks.push(Arc::new(vec![(key, value)]));
                    return None;
                };
                let entries = Arc::make_mut(chunk);
                entries.insert(place.entry, (key, value));
                if entries.len() > MOST {
                    // What grows at its end only stays full.
                    let half = if place.entry + 1 == entries.len() { MOST } else { entries.len() / 2 };
                    let rest = entries.split_off(half);
                    entries.shrink_to_fit();
                    self.chunks.insert(place.chunk + 1, Arc::new(rest));
                }
                None
            }
        }
    }

    /// Takes a key out; returns the value it had.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let place = self.find(key).ok()?;
        let entries = Arc::make_mut(self.chunks.get_mut(place.chunk)?);
        let (_, value) = entries.remove(place.entry);
        self.len -= 1;
        let left = entries.len();
        if left == 0 {
            self.chunks.remove(place.chunk);
        } else if left < FEW {
            self.join(place.chunk);
        }
        Some(value)
    }

    /// Joins a small chunk with the one before it, or after.
    fn join(&mut self, small: usize) {
        let len = |at: usize| self.chunks.get(at).map_or(MOST, |c| c.len());
        let first = [small.checked_sub(1), Some(small)]
            .into_iter()
            .flatten()
            .find(|first| len(*first) + len(first + 1) <= MOST / 4 * 3);
        if let Some(first) = first {
            let second = self.chunks.remove(first + 1);
            if let Some(chunk) = self.chunks.get_mut(first) {
                Arc::make_mut(chunk).extend(second.iter().cloned());
            }
        }
    }

    /// Keeps what `keep` says. Chunks that keep everything stay shared.
    pub fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        for chunk in &mut self.chunks {
            let kept: Vec<bool> = chunk.iter().map(|(k, v)| keep(k, v)).collect();
            if kept.iter().all(|kept| *kept) {
                continue;
            }
            let mut kept = kept.into_iter();
            Arc::make_mut(chunk).retain(|_| kept.next().unwrap_or(true));
        }
        self.chunks.retain(|chunk| !chunk.is_empty());
        self.len = self.chunks.iter().map(|chunk| chunk.len()).sum();
    }

    /// All entries, values to change. Copies what is shared.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.chunks.iter_mut().flat_map(|chunk| Arc::make_mut(chunk).iter_mut().map(|(k, v)| (&*k, v)))
    }

    /// All values, to change. Copies what is shared.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.iter_mut().map(|(_, value)| value)
    }

    /// All values, by key.
    pub fn into_values(self) -> impl Iterator<Item = V> {
        self.into_iter().map(|(_, value)| value)
    }

    /// Adds what `other` has and this one has not. What both have stays this one's; the larger is the one that is shared.
    #[must_use]
    pub fn over(&self, other: &Self) -> Self {
        if self.len >= other.len {
            let mut all = self.clone();
            for (key, value) in other {
                all.or_insert_with(key.clone(), || value.clone());
            }
            return all;
        }
        let mut all = other.clone();
        for (key, value) in self {
            all.insert(key.clone(), value.clone());
        }
        all
    }

    /// Gives a key a value where it has none.
    pub fn or_insert_with(&mut self, key: K, value: impl FnOnce() -> V) {
        if !self.contains_key(&key) {
            self.insert(key, value());
        }
    }
}

impl<K, V> Clone for SharedMap<K, V> {
    fn clone(&self) -> Self {
        Self { chunks: self.chunks.clone(), len: self.len }
    }
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Ord, V: PartialEq> PartialEq for SharedMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.apart(other).all(|(_, a, b)| a == b)
    }
}

impl<K: Ord, V: Eq> Eq for SharedMap<K, V> {}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for SharedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: Ord + Clone, V: Clone> Extend<(K, V)> for SharedMap<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, iter: I) {
        for (key, value) in iter {
            self.insert(key, value);
        }
    }
}

impl<K: Ord + Clone, V: Clone> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(iter: I) -> Self {
        let mut map = Self::new();
        map.extend(iter);
        map
    }
}

impl<'a, K, V> IntoIterator for &'a SharedMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;
    fn into_iter(self) -> Iter<'a, K, V> {
        self.iter()
    }
}

impl<K: Clone, V: Clone> IntoIterator for SharedMap<K, V> {
    type Item = (K, V);
    type IntoIter =
        std::iter::FlatMap<std::vec::IntoIter<Chunk<K, V>>, Vec<(K, V)>, fn(Chunk<K, V>) -> Vec<(K, V)>>;
    fn into_iter(self) -> Self::IntoIter {
        self.chunks.into_iter().flat_map(Arc::unwrap_or_clone)
    }
}

impl<K: Ord + Borrow<Q>, V, Q: Ord + ?Sized> std::ops::Index<&Q> for SharedMap<K, V> {
    type Output = V;
    /// # Panics
    /// When the key is not there, as the maps of the standard library do.
    fn index(&self, key: &Q) -> &V {
        self.get(key).expect("the key is there")
    }
}

impl<K: Ord + Clone, V: Clone, const N: usize> From<[(K, V); N]> for SharedMap<K, V> {
    fn from(entries: [(K, V); N]) -> Self {
        entries.into_iter().collect()
    }
}

/// Entries of a [`SharedMap`] by key.
#[derive(Debug)]
pub struct Iter<'a, K, V> {
    map: &'a SharedMap<K, V>,
    at: Place,
}

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.map.at(self.at)?;
        self.at = self.map.after(self.at);
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u16, u8),
        Remove(u16),
        Change(u16, u8),
        Retain(u8),
        /// From here on the version before is this one.
        Fork,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0u16..600, any::<u8>()).prop_map(|(k, v)| Step::Insert(k, v)),
            6 => (0u16..600).prop_map(Step::Remove),
            2 => (0u16..600, any::<u8>()).prop_map(|(k, v)| Step::Change(k, v)),
            1 => (0u8..8).prop_map(Step::Retain),
            1 => Just(Step::Fork),
        ]
    }

    fn differences(a: &BTreeMap<u16, u8>, b: &BTreeMap<u16, u8>) -> Vec<(u16, Option<u8>, Option<u8>)> {
        let keys: std::collections::BTreeSet<u16> = a.keys().chain(b.keys()).copied().collect();
        let pair = |k: u16| (k, a.get(&k).copied(), b.get(&k).copied());
        keys.into_iter().map(pair).filter(|(_, x, y)| x != y).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn it_is_a_sorted_map_and_finds_every_difference(
            first in proptest::collection::vec(0u16..600, 0..600),
            steps in proptest::collection::vec(step(), 0..400),
        ) {
            let mut map: SharedMap<u16, u8> = first.iter().map(|k| (*k, 0)).collect();
            let mut model: BTreeMap<u16, u8> = first.iter().map(|k| (*k, 0)).collect();
            let (mut before, mut model_before) = (map.clone(), model.clone());
            for step in steps {
                match step {
                    Step::Insert(k, v) => prop_assert_eq!(map.insert(k, v), model.insert(k, v)),
                    Step::Remove(k) => prop_assert_eq!(map.remove(&k), model.remove(&k)),
                    Step::Change(k, v) => {
                        prop_assert_eq!(map.get_mut(&k).map(|held| *held = v), model.get_mut(&k).map(|held| *held = v));
                    }
                    Step::Retain(n) => {
                        map.retain(|k, _| k % 8 != u16::from(n));
                        model.retain(|k, _| k % 8 != u16::from(n));
                    }
                    Step::Fork => (before, model_before) = (map.clone(), model.clone()),
                }
                prop_assert_eq!(map.len(), model.len());
                prop_assert!(map.chunks.iter().all(|c| !c.is_empty() && c.len() <= MOST));
            }
            prop_assert!(map.iter().eq(model.iter()));
            prop_assert!(before.iter().eq(model_before.iter()), "a clone changed with the original");
            let found: Vec<_> = before
                .apart(&map)
                .map(|(k, x, y)| (*k, x.copied(), y.copied()))
                .filter(|(_, x, y)| x != y)
                .collect();
            prop_assert_eq!(found, differences(&model_before, &model));
            prop_assert_eq!(before == map, model_before == model);
            for k in 0..600 {
                prop_assert_eq!(map.get(&k), model.get(&k));
                prop_assert!(map.starting_at(&k).eq(model.range(k..)));
            }
        }
    }

    #[test]
    fn of_two_the_upper_wins() {
        let few: SharedMap<u8, u8> = (0..5).map(|n| (n * 3, 1)).collect();
        let many: SharedMap<u8, u8> = (0..10).map(|n| (n, 2)).collect();
        for (upper, lower) in [(&few, &many), (&many, &few)] {
            let both: BTreeMap<u8, u8> = lower.iter().chain(upper.iter()).map(|(k, v)| (*k, *v)).collect();
            assert!(upper.over(lower).iter().eq(both.iter()));
        }
        assert!(SharedMap::new().over(&many).is_same(&many));
    }

    #[test]
    fn one_change_in_a_large_map_is_found_in_one_chunk() {
        let map: SharedMap<u32, u32> = (0..100_000).map(|n| (n, n)).collect();
        let mut next = map.clone();
        next.insert(50_000, 1);
        next.remove(&70_000);
        assert!(map.apart(&next).count() <= 3 * MOST);
    }
}
