// Foundation: on Linux GNUstep's with additions; for the cross build the declarations that the extension uses.
// Written from the public documentation, without any code of Apple's headers.
#pragma once

#ifndef __APPLE__
#include_next <Foundation/Foundation.h>
#undef _  // GNUstep's macro for translated strings; it breaks every C++ header that names something `_`
#ifdef __cplusplus
#undef nil  // GCC's is an `id` and does not convert to `NSError**`; macOS's does
#define nil nullptr
#endif
#else
#import <objc/NSObject.h>
#import <objc/objc.h>
#include <stdint.h>
#endif

#ifndef NS_ASSUME_NONNULL_BEGIN
#define NS_ASSUME_NONNULL_BEGIN _Pragma("clang assume_nonnull begin")
#define NS_ASSUME_NONNULL_END _Pragma("clang assume_nonnull end")
#endif

#ifdef __APPLE__
#include <os/availability.h>
#define NS_ENUM(type, name) \
  enum name : type name;    \
  enum name : type
#define NS_OPTIONS(type, name) \
  enum name : type name;       \
  enum name : type

NS_ASSUME_NONNULL_BEGIN

@class NSArray<ObjectType>, NSDictionary<KeyType, ObjectType>, NSString;
typedef double NSTimeInterval;
typedef struct _NSRange {
  NSUInteger location;
  NSUInteger length;
} NSRange;
typedef NSUInteger NSStringEncoding;
enum : NSStringEncoding { NSASCIIStringEncoding = 1, NSUTF8StringEncoding = 4 };
typedef NSString* NSErrorDomain;

@protocol NSCopying
- (id)copyWithZone:(nullable struct _NSZone*)zone;
@end

@interface NSString : NSObject <NSCopying>
@property(readonly) NSUInteger length;
@property(nullable, readonly) const char* UTF8String;
+ (instancetype)string;
+ (nullable instancetype)stringWithUTF8String:(const char*)text;
+ (nullable instancetype)stringWithCString:(const char*)text encoding:(NSStringEncoding)encoding;
+ (instancetype)stringWithFormat:(NSString*)format, ... __attribute__((format(__NSString__, 1, 2)));
- (nullable instancetype)initWithUTF8String:(const char*)text;
- (nullable instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)length encoding:(NSStringEncoding)encoding;
- (BOOL)isEqualToString:(NSString*)other;
@end

@interface NSArray<__covariant ObjectType> : NSObject
@property(readonly) NSUInteger count;
- (ObjectType)objectAtIndex:(NSUInteger)index;
- (ObjectType)objectAtIndexedSubscript:(NSUInteger)index;
@end

@interface NSDictionary<__covariant KeyType, __covariant ObjectType> : NSObject
@property(readonly) NSUInteger count;
+ (instancetype)dictionary;
+ (instancetype)dictionaryWithObjects:(const ObjectType _Nonnull __unsafe_unretained[_Nullable])objects
                              forKeys:(const KeyType<NSCopying> _Nonnull __unsafe_unretained[_Nullable])keys
                                count:(NSUInteger)count;
- (nullable ObjectType)objectForKey:(KeyType)key;
- (nullable ObjectType)objectForKeyedSubscript:(KeyType)key;
@end

@interface NSNumber : NSObject
+ (NSNumber*)numberWithInt:(int)value;
+ (NSNumber*)numberWithBool:(BOOL)value;
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)value;
@property(readonly) int intValue;
@property(readonly) NSUInteger unsignedIntegerValue;
@end

@interface NSError : NSObject
@property(readonly) NSInteger code;
@property(readonly, copy) NSErrorDomain domain;
@property(readonly, copy) NSString* localizedDescription;
@end

typedef struct {
  NSInteger majorVersion;
  NSInteger minorVersion;
  NSInteger patchVersion;
} NSOperatingSystemVersion;

@interface NSProcessInfo : NSObject
@property(class, readonly, strong) NSProcessInfo* processInfo;
@property(readonly) NSOperatingSystemVersion operatingSystemVersion;
- (BOOL)isOperatingSystemAtLeastVersion:(NSOperatingSystemVersion)version;
@end

@interface NSAutoreleasePool : NSObject
- (void)drain;
@end

NS_ASSUME_NONNULL_END

#else  // additions to GNUstep

#ifndef API_AVAILABLE
#define API_AVAILABLE(...)
#define API_DEPRECATED(...)
#define API_DEPRECATED_WITH_REPLACEMENT(...)
#endif

NS_ASSUME_NONNULL_BEGIN
typedef NSString* NSErrorDomain;
typedef struct {
  NSInteger majorVersion;
  NSInteger minorVersion;
  NSInteger patchVersion;
} NSOperatingSystemVersion;

// The simulated Metal returns the macOS version that it plays.
@interface NSProcessInfo (MacOSVersion)
@property(readonly) NSOperatingSystemVersion operatingSystemVersion;
- (BOOL)isOperatingSystemAtLeastVersion:(NSOperatingSystemVersion)version;
@end
NS_ASSUME_NONNULL_END
#endif
